#include "parallel.h"

#include <pthread.h>

#include <atomic>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace fulmen {
namespace {

std::atomic<bool> forked{false};

const int watching_forks = pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

}  // namespace

void run_tasks(int64_t threads, int64_t tasks, void (*body)(void *, int64_t, int64_t), void *context) {
    (void)watching_forks;
#ifdef _OPENMP
    if (threads > tasks) threads = tasks;
    if (threads > 1 && !forked.load(std::memory_order_relaxed) && !omp_in_parallel()) {
#pragma omp parallel for num_threads((int)threads) schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; ++task) body(context, task, omp_get_thread_num());
        return;
    }
#endif
    for (int64_t task = 0; task < tasks; ++task) body(context, task, 0);
}

bool has_openmp() {
#ifdef _OPENMP
    return true;
#else
    return false;
#endif
}

}  // namespace fulmen
