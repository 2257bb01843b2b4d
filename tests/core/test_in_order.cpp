// The ordered hand-over on threads of our own, which ThreadSanitizer sees through (it does not through OpenMP's). What
// is handed over are plain numbers: a read or a write that nothing orders is a race.
#include "in_order.h"

#include <memory>
#include <vector>

#include "check.h"

#ifndef SEEDS
#define SEEDS 20
#endif

using namespace fulmen;

namespace {

class HandOver {
public:
    HandOver(int64_t threads, int64_t steps, uint32_t seed)
        : steps(steps), seed(seed), workers(new Worker[(size_t)threads]), computed((size_t)steps) {
        InOrder order(steps, {[](void *x, int64_t worker) { ((HandOver *)x)->begin(worker); },
                              [](void *x, const Turn &turn) { ((HandOver *)x)->compute(turn); },
                              [](void *x, int64_t step, int64_t worker, int64_t slot) {
                                  ((HandOver *)x)->collect(step, worker, slot);
                              },
                              this});
        std::vector<std::thread> running;
        for (int64_t w = 0; w < threads; ++w) running.emplace_back([&, w] { order.work(w, threads); });
        for (std::thread &thread : running) thread.join();
        order.collect();

        CHECK(collected == steps, "%d of %d steps were collected", (int)collected, (int)steps);
        for (int64_t w = 0; w < threads; ++w) {
            CHECK(workers[w].begun == 1, "worker %d began %d times", (int)w, workers[w].begun);
            CHECK(workers[w].promised < 0, "worker %d never came to step %d", (int)w, (int)workers[w].promised);
        }
        for (int64_t s = 0; s < steps; ++s)
            CHECK(computed[(size_t)s] == 1, "step %d was computed %d times", (int)s, computed[(size_t)s]);
    }

private:
    // What one thread has; the slots are also read by whoever collects.
    struct alignas(64) Worker {
        int begun = 0;
        int64_t turns = 0, last = -1, promised = -1;
        int64_t slots[2] = {-1, -1};
    };

    void begin(int64_t worker) { ++workers[worker].begun; }

    void compute(const Turn &turn) {
        Worker &own = workers[turn.worker];
        CHECK(own.begun == 1, "worker %d computes before it began", (int)turn.worker);
        CHECK(turn.before == own.last, "step %d comes after %d, not %d", (int)turn.step, (int)own.last,
              (int)turn.before);
        CHECK(turn.step > turn.before && turn.step < steps, "step %d after %d", (int)turn.step, (int)turn.before);
        CHECK(own.promised < 0 || own.promised == turn.step, "step %d, and %d was promised", (int)turn.step,
              (int)own.promised);
        CHECK(turn.after < 0 || (turn.after > turn.step && turn.after < steps), "%d after step %d", (int)turn.after,
              (int)turn.step);
        CHECK(turn.slot == own.turns % 2, "turn %d leaves its result in slot %d", (int)own.turns, (int)turn.slot);
        CHECK(own.slots[turn.slot] < 0, "step %d overwrites %d", (int)turn.step, (int)own.slots[turn.slot]);
        ++own.turns;
        own.last = turn.step;
        own.promised = turn.after;
        ++computed[(size_t)turn.step];
        own.slots[turn.slot] = turn.step;
        dawdle(turn.step);
    }

    void collect(int64_t step, int64_t worker, int64_t slot) {
        CHECK(step == collected, "step %d was collected after %d others", (int)step, (int)collected);
        CHECK(workers[worker].slots[slot] == step, "step %d: the slot has %d", (int)step,
              (int)workers[worker].slots[slot]);
        workers[worker].slots[slot] = -1;
        ++collected;
        dawdle(~step);
    }

    // Some steps take long, so that the order in which threads come is another each time.
    void dawdle(int64_t step) const {
        Random random(seed + (uint32_t)step * 2654435761u);
        random.bits();
        const int64_t kind = random.below(8);
        if (kind == 0) std::this_thread::yield();
        if (kind == 1) std::this_thread::sleep_for(std::chrono::microseconds(random.below(50)));
    }

    const int64_t steps;
    const uint32_t seed;
    const std::unique_ptr<Worker[]> workers;
    std::vector<int> computed;
    int64_t collected = 0;  // plain on purpose: never two threads at once
};

}  // namespace

int main() {
    for (const int64_t threads : {1, 2, 3, 4, 7, 16, 33})
        for (const int64_t steps : {0, 1, 2, 3, 5, 8, 40, 400})
            for (uint32_t seed = 0; seed < SEEDS; ++seed) HandOver(threads, steps, seed);
    return outcome();
}
