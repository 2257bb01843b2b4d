#include "parallel.h"

#include <pthread.h>

#include <atomic>

#include "in_order.h"

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
