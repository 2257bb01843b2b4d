// The hand-over of run_in_order, without locks and on threads of any kind: each calls work once, and when all are
// back, one calls collect.
#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "parallel.h"

namespace fulmen {

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

}  // namespace fulmen
