// Heads that read the same inputs. They walk side by side, a segment at a time, and their gradients of what they share
// are summed after each.
#pragma once

#include "arena.h"
#include "axis.h"
#include "tasks.h"

namespace fulmen {
namespace FULMEN_ISA {

constexpr int64_t kSharedSegment = 256;  // tokens, at most

// Some threads, and heads that they walk side by side; heads are counted over all sequences.
struct Team {
    int64_t threads, first, heads;
    char *memory;
    int64_t head_bytes;

    char *memory_of(int64_t head) const { return memory + (head - first) * head_bytes; }
    template <class F> void for_each_head(F f) const {
        for_each_head_on_worker([&](int64_t head, int64_t) { f(head); });
    }
    // f(head, worker), with worker in [0, threads).
    template <class F> void for_each_head_on_worker(F f) const {
        parallel_for(threads, heads, [&](int64_t task, int64_t worker) { f(first + task, worker); });
    }
};

// A gradient that several heads contribute to: each writes float32 rows of its own, which are summed in the order of
// heads.
struct SharedGradient {
    const fulmen_tensor *tensor;
    int64_t heads, size;
    int64_t offset = 0;  // of a head's rows in its memory

    // How many heads contribute to one.
    int64_t sharers(const fulmen_problem &p) const { return tensor->data ? p.heads / heads : 1; }

    void reserve(Arena &head, const fulmen_problem &p, int64_t tokens) {
        offset = head.bytes();
        if (sharers(p) > 1) head.floats(tokens * size);
    }
    // Where a head writes the gradients of a segment that begins at token `first`.
    Rows own(const fulmen_problem &p, const Team &team, int64_t head, int64_t first, Rows unshared) const {
        if (sharers(p) == 1) return unshared;
        return {(char *)(rows(team, head) - first * size), FULMEN_FLOAT32, size};
    }
    void sum(const fulmen_problem &p, const Team &team, int64_t first, int64_t last) const {
        const int64_t together = sharers(p), blocks = (last - first + kChunk - 1) / kChunk;
        if (together == 1) return;
        parallel_for(team.threads, team.heads / together * blocks, [&](int64_t task, int64_t) {
            const int64_t head = team.first + task / blocks * together, block = first + task % blocks * kChunk;
            const Sequence s = sequence(p, head / p.heads);
            const Rows to = rows_of(*tensor, s.batch, head % p.heads / together).from(s.first, 0);
            for (int64_t t = block; t < smaller(block + kChunk, smaller(last, s.tokens)); ++t) {
                float *total = rows(team, head) + (t - first) * size;
                for (int64_t other = 1; other < together; ++other) {
                    const float *row = rows(team, head + other) + (t - first) * size;
                    for (int64_t f = 0; f < size; ++f) total[f] += row[f];
                }
                with_type(to.dtype, [&](auto type) {
                    store_channels(type, total, size, (typename decltype(type)::Stored *)to.row(t));
                });
            }
        });
    }

private:
    float *rows(const Team &team, int64_t head) const { return (float *)(team.memory_of(head) + offset); }
};

// How threads and heads make up teams. A group is the smallest number of neighbours that share with nobody else.
struct Teams {
    int64_t count, threads, heads;

    // A team of one thread never waits, but holds a whole group in memory, and there must be enough groups.
    Teams(const fulmen_problem &p, int64_t all_threads, int64_t group) : count(1), threads(all_threads), heads(group) {
        const int64_t groups = sequences_of(p) * p.heads / group;
        const bool enough = groups % all_threads == 0 || groups >= kTasks * all_threads;
        if (group == 1 || (group <= kMostAlone && enough)) {
            count = all_threads;
            threads = 1;
        } else {
            heads *= smaller(groups, (kTasks * all_threads + group - 1) / group);
        }
    }

    template <class F> void for_each(int64_t all_heads, char *memory, int64_t head_bytes, F f) const {
        for_each_team(all_heads, memory, heads * head_bytes, [&](Team team) {
            team.head_bytes = head_bytes;
            f(team);
        });
    }
    // A team's memory is not only its heads'.
    template <class F> void for_each_team(int64_t all_heads, char *memory, int64_t team_bytes, F f) const {
        parallel_for(count, (all_heads + heads - 1) / heads, [&](int64_t task, int64_t worker) {
            const int64_t first = task * heads;
            f(Team{threads, first, smaller(heads, all_heads - first), memory + worker * team_bytes, 0});
        });
    }

private:
    static constexpr int64_t kMostAlone = 8;  // heads that one thread walks side by side
    static constexpr int64_t kTasks = 4;      // for each thread, when they are not equally many for all
};

// The least common multiple of the numbers of heads that share.
template <int n> int64_t group_of(const fulmen_problem &p, const SharedGradient *const (&gradients)[n]) {
    int64_t group = 1;
    for (const SharedGradient *x : gradients)
        for (const int64_t step = group; group % x->sharers(p) != 0;) group += step;
    return group;
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
