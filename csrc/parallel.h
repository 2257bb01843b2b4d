// Tasks on threads, by OpenMP when the library was built with it.
#pragma once

#include <stdint.h>

namespace fulmen {

// Calls body(context, task, worker) for every task in [0, tasks), with worker in [0, threads). Serial in a forked
// child, where OpenMP's threads no longer exist.
void run_tasks(int64_t threads, int64_t tasks, void (*body)(void *context, int64_t task, int64_t worker),
               void *context);

bool has_openmp();

#ifdef FULMEN_ISA
namespace FULMEN_ISA {
template <class F> static inline void parallel_for(int64_t threads, int64_t tasks, F f) {
    run_tasks(threads, tasks, [](void *context, int64_t task, int64_t worker) { (*(F *)context)(task, worker); }, &f);
}
}  // namespace FULMEN_ISA
#endif

}  // namespace fulmen
