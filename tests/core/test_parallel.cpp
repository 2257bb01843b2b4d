// Tasks on threads: each is done once, by a worker whose memory nobody else uses meanwhile; in order; after a fork.
#include "parallel.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "check.h"

using namespace fulmen;

namespace {

constexpr int64_t kCounts[] = {1, 2, 3, 8, 33};

struct Tasks {
    int64_t threads;
    std::vector<std::atomic<int>> done;
    std::vector<std::atomic<int>> busy;  // by worker
    Tasks(int64_t threads, int64_t tasks) : threads(threads), done((size_t)tasks), busy((size_t)threads) {}

    void run() {
        run_tasks(
            threads, (int64_t)done.size(),
            [](void *x, int64_t task, int64_t worker) { ((Tasks *)x)->task(task, worker); }, this);
    }
    void task(int64_t task, int64_t worker) {
        CHECK(worker >= 0 && worker < threads, "worker %d of %d", (int)worker, (int)threads);
        CHECK(busy[(size_t)worker]++ == 0, "worker %d has two tasks at once", (int)worker);
        ++done[(size_t)task];
        --busy[(size_t)worker];
    }
    void check_done() const {
        for (size_t t = 0; t < done.size(); ++t)
            CHECK(done[t] == 1, "task %d was done %d times", (int)t, done[t].load());
    }
};

void check_tasks() {
    for (const int64_t threads : kCounts)
        for (const int64_t tasks : {0, 1, 2, 7, 500}) {
            Tasks x(threads, tasks);
            x.run();
            x.check_done();
        }
}

// Tasks inside tasks are done by the thread that has them.
void check_nested() {
    struct Outer {
        std::vector<std::unique_ptr<Tasks>> inner;
    } outer;
    for (int i = 0; i < 20; ++i) outer.inner.emplace_back(new Tasks(4, 30));
    run_tasks(4, 20, [](void *x, int64_t task, int64_t) { ((Outer *)x)->inner[(size_t)task]->run(); }, &outer);
    for (const auto &tasks : outer.inner) tasks->check_done();
}

void check_on_each() {
    for (const int64_t threads : kCounts) {
        struct Each {
            int64_t most;
            std::atomic<int64_t> workers;
            std::vector<std::atomic<int>> called;
        } each{threads, {0}, std::vector<std::atomic<int>>((size_t)threads)};
        run_on_each(
            threads,
            [](void *x, int64_t worker, int64_t workers) {
                Each &each = *(Each *)x;
                CHECK(worker >= 0 && worker < workers && workers <= each.most, "worker %d of %d", (int)worker,
                      (int)workers);
                each.workers = workers;
                ++each.called[(size_t)worker];
            },
            &each);
        for (int64_t w = 0; w < threads; ++w)
            CHECK(each.called[(size_t)w] == (w < each.workers), "worker %d was called %d times", (int)w,
                  each.called[(size_t)w].load());
    }
}

// As a sum that only comes out right in order.
void check_in_order() {
    for (const int64_t threads : kCounts)
        for (const int64_t steps : {0, 1, 3, 300}) {
            struct Sum {
                std::vector<uint64_t> slots;
                uint64_t total;
                static uint64_t then(uint64_t total, uint64_t x) { return total * 6364136223846793005u + x; }
            } sum{std::vector<uint64_t>((size_t)(2 * threads)), 1};
            run_in_order(threads, steps,
                         {[](void *, int64_t) {},
                          [](void *x, const Turn &turn) {
                              ((Sum *)x)->slots[(size_t)(2 * turn.worker + turn.slot)] = (uint64_t)turn.step;
                          },
                          [](void *x, int64_t, int64_t worker, int64_t slot) {
                              Sum &sum = *(Sum *)x;
                              sum.total = Sum::then(sum.total, sum.slots[(size_t)(2 * worker + slot)]);
                          },
                          &sum});
            uint64_t expected = 1;
            for (int64_t s = 0; s < steps; ++s) expected = Sum::then(expected, (uint64_t)s);
            CHECK(sum.total == expected, "%d steps on %d threads", (int)steps, (int)threads);
        }
}

// The threads of the pool are not in the child: it would wait for them for ever.
void check_fork() {
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);
        check_tasks();
        check_in_order();
        _exit(failures > 0);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "no child");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the forked child ended with status %d", status);
}

}  // namespace

int main() {
    check_tasks();
    check_nested();
    check_on_each();
    check_in_order();
    check_fork();
    return outcome();
}
