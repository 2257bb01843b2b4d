#include "parallel.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace fulmen {
namespace {

std::atomic<bool> forked{false};

const int watching_forks = pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

}  // namespace

static bool runs_serially(int64_t threads) {
    (void)watching_forks;
#ifdef _OPENMP
    return threads <= 1 || forked.load(std::memory_order_relaxed) || omp_in_parallel();
#else
    (void)threads;
    return true;
#endif
}

void run_tasks(int64_t threads, int64_t tasks, void (*body)(void *, int64_t, int64_t), void *context) {
    if (threads > tasks) threads = tasks;
    if (runs_serially(threads)) {
        for (int64_t task = 0; task < tasks; ++task) body(context, task, 0);
        return;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads((int)threads) schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; ++task) body(context, task, omp_get_thread_num());
#endif
}

void run_on_each(int64_t threads, void (*body)(void *, int64_t, int64_t), void *context) {
    if (runs_serially(threads)) return body(context, 0, 1);
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads)
    body(context, omp_get_thread_num(), omp_get_num_threads());
#endif
}

namespace {

class InOrder {
public:
    InOrder(int64_t steps, OrderedCalls calls)
        : steps(steps), calls(calls), computed(new std::atomic<int64_t>[(size_t)steps]()) {}

    void work(int64_t worker, int64_t workers) {
        calls.begin(calls.context, worker);
        int64_t before = -1, before_that = -1;
        for (int64_t turns = 0, step = taken++; step < steps; ++turns) {
            while (collected.load(std::memory_order_acquire) <= before_that)
                if (!collect()) std::this_thread::yield();
            // With its next step in view it can fetch what that needs; the last steps are left to whoever is free.
            int64_t after = taken.load(std::memory_order_relaxed) + workers < steps ? taken++ : -1;
            if (after >= steps) after = -1;  // others were faster
            const int64_t slot = turns % 2;
            calls.compute(calls.context, {worker, before, step, after, slot});
            computed[step].store(1 + 2 * worker + slot, std::memory_order_release);
            collect();
            before_that = before;
            before = step;
            step = after < 0 ? taken++ : after;
        }
    }

    // All that can be collected now, unless another thread is at it; whether anything was.
    bool collect() {
        if (collecting.test_and_set(std::memory_order_acquire)) return false;
        const int64_t first = collected.load(std::memory_order_relaxed);
        int64_t step = first;
        for (int64_t place; step < steps && (place = computed[step].load(std::memory_order_acquire)) > 0;) {
            calls.collect(calls.context, step, (place - 1) / 2, (place - 1) % 2);
            collected.store(++step, std::memory_order_release);
        }
        collecting.clear(std::memory_order_release);
        return step > first;
    }

private:
    const int64_t steps;
    const OrderedCalls calls;
    const std::unique_ptr<std::atomic<int64_t>[]> computed;  // by step: 1 + 2 worker + slot, once it is
    std::atomic<int64_t> taken{0}, collected{0};
    std::atomic_flag collecting = ATOMIC_FLAG_INIT;
};

}  // namespace

void run_in_order(int64_t threads, int64_t steps, OrderedCalls calls) {
    InOrder order(steps, calls);
    run_on_each(
        threads, [](void *context, int64_t worker, int64_t workers) { ((InOrder *)context)->work(worker, workers); },
        &order);
    order.collect();  // what was computed while another thread had just looked
}

bool has_openmp() {
#ifdef _OPENMP
    return true;
#else
    return false;
#endif
}

}  // namespace fulmen
