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

// A worker in [0, threads) at one of its steps, coming from `before` (-1: from none). `after` is where it will go on,
// if that is known (else -1). It has two slots, and leaves its result in `slot`.
struct Turn {
    int64_t worker, before, step, after, slot;
};
struct OrderedCalls {
    void (*begin)(void *context, int64_t worker);  // each worker, before its first step
    void (*compute)(void *context, const Turn &turn);
    void (*collect)(void *context, int64_t step, int64_t worker, int64_t slot);  // never by two threads at once
    void *context;
};
// Steps in [0, steps) that threads compute in any order, and that are collected in theirs.
void run_in_order(int64_t threads, int64_t steps, OrderedCalls calls);

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

// What any of the tasks may notice. (std::atomic is not of this build's namespace.)
class Notice {
public:
    void operator|=(bool noticed) {
        if (noticed) __atomic_store_n(&noticed_, true, __ATOMIC_RELAXED);
    }
    operator bool() const { return __atomic_load_n(&noticed_, __ATOMIC_RELAXED); }

private:
    bool noticed_ = false;
};

// begin(worker), compute(turn) and collect(step, worker, slot); see run_in_order.
template <class Begin, class Compute, class Collect>
static inline void parallel_in_order(int64_t threads, int64_t steps, Begin begin, Compute compute, Collect collect) {
    struct Context {
        Begin &begin;
        Compute &compute;
        Collect &collect;
    } context{begin, compute, collect};
    run_in_order(
        threads, steps,
        {[](void *x, int64_t worker) { ((Context *)x)->begin(worker); },
         [](void *x, const Turn &turn) { ((Context *)x)->compute(turn); },
         [](void *x, int64_t step, int64_t worker, int64_t slot) { ((Context *)x)->collect(step, worker, slot); },
         &context});
}

// f(item) for every item in [0, items), each thread always on the same range of them, as torch's elementwise operations
// are: from call to call, a state stays in the cache of the core that has it.
template <class F> static inline void parallel_for_in_place(int64_t threads, int64_t items, F f) {
    struct Context {
        int64_t items;
        F &f;
    } context{items, f};
    run_on_each(
        threads,
        [](void *pointer, int64_t worker, int64_t workers) {
            Context &x = *(Context *)pointer;
            for (int64_t i = x.items * worker / workers; i < x.items * (worker + 1) / workers; ++i) x.f(i);
        },
        &context);
}
}  // namespace FULMEN_ISA
#endif

}  // namespace fulmen
