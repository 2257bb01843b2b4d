// Tasks on threads, by OpenMP when the library was built with it.
#pragma once

#include <stdint.h>

namespace fulmen {

// Calls body(context, task, worker) for every task in [0, tasks), with worker in [0, threads). Serial in a forked
// child, where OpenMP's threads no longer exist.
void run_tasks(int64_t threads, int64_t tasks, void (*body)(void *context, int64_t task, int64_t worker),
               void *context);

// Calls body(context, worker, workers) once on each of at most `threads` threads, serially where run_tasks is serial.
void run_on_each(int64_t threads, void (*body)(void *context, int64_t worker, int64_t workers), void *context);

bool has_openmp();

#ifdef FULMEN_ISA
namespace FULMEN_ISA {
// Below this much work per thread, waking another thread costs more than it saves.
constexpr double kFlopsPerThread = 2e6;

static inline int64_t worthwhile_threads(int64_t threads, double flops) {
    const double most = 1 + flops / kFlopsPerThread;
    return most < (double)threads ? (int64_t)most : threads;
}

template <class F> static inline void parallel_for(int64_t threads, int64_t tasks, F f) {
    run_tasks(threads, tasks, [](void *context, int64_t task, int64_t worker) { (*(F *)context)(task, worker); }, &f);
}

// f(item) for every item in [0, items), each thread always on the same stretch of them, as torch's elementwise operations
// are: from call to call, a state stays in the cache of the core that has it.
template <class F> static inline void parallel_for_in_place(int64_t threads, int64_t items, F f) {
    struct Context {
        int64_t items;
        F &f;
    } context{items, f};
    run_on_each(threads, [](void *pointer, int64_t worker, int64_t workers) {
        Context &x = *(Context *)pointer;
        for (int64_t i = x.items * worker / workers; i < x.items * (worker + 1) / workers; ++i) x.f(i);
    }, &context);
}
}  // namespace FULMEN_ISA
#endif

}  // namespace fulmen
