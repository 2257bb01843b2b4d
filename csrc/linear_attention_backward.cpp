// The backward pass: which worker takes which head, where states are kept, and how shared heads are summed.
#include <initializer_list>
#include <utility>

#include "backward_worker.h"
#include "kernels.h"
#include "segments.h"
#include "shared_gradient.h"
#include "tiles.h"

namespace fulmen {
namespace FULMEN_ISA {
namespace {

// States kept by the first walk, for the decay gradient's restarts: at most this many of each head, evenly spaced. What
// a difference is off by, all tokens up to the next restart are, and a gradient of form [H] is their sum: it has more.
constexpr int64_t kMostKept = 32, kMostKeptWhenShared = 8, kLeastSpacing = 8, kLeastSpacingPerHead = 2;

bool shares_heads(const fulmen_problem &p) {
    return p.query_heads < p.heads || p.key_heads < p.heads || p.value_heads < p.heads;
}

bool wants_decays(const fulmen_attention_backward_call &call) { return call.dlog_decay.data || call.dlog_decay_v.data; }
bool wants_first_walk(const fulmen_attention_backward_call &call) { return call.dq.data || wants_decays(call); }
bool wants_second_walk(const fulmen_attention_backward_call &call) {
    return call.dk.data || call.dv.data || call.dinitial.data || wants_decays(call);
}

// The gradient of the queries is linear attention too, of the output's gradient to the values, over the keys:
//
//     dq_i = scale S_i do_i,     S_i^T = e^{a_i} S_{i-1}^T + v_i k_i^T
//
// The forward computes it in fewer passes than the first walk, which other gradients need: those of decays, those that
// heads share, and decays per channel, which weigh what the two have exchanged.
bool query_gradient_is_attention(const fulmen_attention_backward_call &call) {
    const fulmen_problem &p = call.problem;
    return call.dq.data && call.grad_output.data && call.grad_output.dtype == p.k.dtype && !wants_decays(call) &&
           p.query_heads == p.heads && !by_channel(p.decay_form) && !decays(p.decay_v_form);
}

fulmen_attention_forward_call query_gradient(const fulmen_attention_backward_call &call) {
    fulmen_attention_forward_call x = {};
    x.problem = call.problem;
    x.problem.q = call.grad_output;
    std::swap(x.problem.k, x.problem.v);
    std::swap(x.problem.key_heads, x.problem.value_heads);
    std::swap(x.problem.key_size, x.problem.value_size);
    std::swap(x.problem.initial_state.stride_row, x.problem.initial_state.stride_column);
    if (x.problem.schedule == FULMEN_RECURRENT) x.problem.schedule = FULMEN_LOOP;
    x.output = call.dq;
    return x;
}

#if FULMEN_TILES
// So are those of keys and values, from the last token to the first, with the gradient of the state for a state:
//
//     dk_j = scale T_j v_j,     dv_j = scale T_j^T k_j,     T_j = e^{a_{j+1}} T_{j+1} + q_j do_j^T
//
// That is all of a backward without gradients of decays, of inputs that heads share, or of states.
bool is_attention_throughout(const fulmen_attention_backward_call &call) {
    const fulmen_problem &p = call.problem;
    return attends_in_tiles(p) && !by_channel(p.decay_form) && call.grad_output.data &&
           call.grad_output.dtype == p.k.dtype && !wants_decays(call) && !call.grad_state.data && !call.dinitial.data &&
           !shares_heads(p);
}

int64_t attention_backward_in_tiles(const fulmen_attention_backward_call &call) {
    const fulmen_problem &p = call.problem;
    fulmen_attention_forward_call queries = query_gradient(call), keys = queries, values = queries;
    keys.problem.q = p.v, keys.problem.k = call.grad_output, keys.problem.v = p.q;
    keys.output = call.dk;
    values.problem.q = p.k, values.problem.k = p.q, values.problem.v = call.grad_output;
    std::swap(values.problem.key_size, values.problem.value_size);
    values.output = call.dv;
    int64_t bytes = 0;
    for (fulmen_attention_forward_call *x : {&queries, &keys, &values})
        bytes = larger(bytes, attention_forward_workspace(*x));
    char *const workspace = workspace_of(p.header, bytes);
    if (!workspace) return FULMEN_NO_WORKSPACE;
    for (fulmen_attention_forward_call *x : {&queries, &keys, &values}) {
        x->problem.header.workspace = workspace;
        x->problem.header.workspace_bytes = bytes;
        const bool reversed = x != &queries;
        if (reversed) x->problem.initial_state.data = nullptr;
        if (x->output.data) attention_forward_in_tiles(*x, reversed);
    }
    return FULMEN_OK;
}
#endif

// Tokens of a sequence, and the state and gradient of a state that enter them from the left and from the right.
struct Segment {
    int64_t index, first, tokens;
    const Summary *state = nullptr, *grad_state = nullptr;  // null: the call's own
};

// One head's way through both walks. All it needs stands in one piece of workspace, since heads that share inputs
// take turns segment by segment. `longest` is the most tokens that it will have.
template <class Element> class HeadBackward {
public:
    HeadBackward(Arena &arena, const fulmen_attention_backward_call &call, int64_t longest)
        : p(call.problem),
          restarts(wants_decays(call)),
          has_first_walk(wants_first_walk(call)),
          has_second_walk(wants_second_walk(call)),
          worker(arena, call.problem, call.dlog_decay.data, call.dlog_decay_v.data) {
        const bool per_head = call.dlog_decay.data && !has_tokens(p.decay_form);
        most_kept = shares_heads(p) ? kMostKeptWhenShared : kMostKept;
        least_spacing = per_head ? kLeastSpacingPerHead : kLeastSpacing;
        const int64_t states = smaller(most_kept, (chunks_of(longest) + least_spacing - 1) / least_spacing);
        if (restarts) kept = arena.floats(states * panels_size(p.key_size, p.value_size));
        if (per_head) per_token = arena.floats(longest);
    }

    void start(const fulmen_attention_backward_call &call, int64_t index) {
        start(call, index, {0, 0, sequence(p, index / p.heads).tokens});
    }
    void start(const fulmen_attention_backward_call &call, int64_t index, const Segment &segment) {
        s = sequence(p, index / p.heads);
        s.first += segment.first;
        s.tokens = segment.tokens;
        spacing = larger(least_spacing, (chunks_of(s.tokens) + most_kept - 1) / most_kept);
        entering = segment.state;
        entering_gradient = segment.grad_state;
        const int64_t h = index % p.heads;
        worker.start(head_of(p, s, h, 0));
        HeadGradients &out = worker.out;
        out.output = rows_of(call.grad_output, s.batch, h).from(s.first, 0);
        out.q = rows_of(call.dq, s.batch, h / (p.heads / p.query_heads)).from(s.first, 0);
        out.k = rows_of(call.dk, s.batch, h / (p.heads / p.key_heads)).from(s.first, 0);
        out.v = rows_of(call.dv, s.batch, h / (p.heads / p.value_heads)).from(s.first, 0);
        out.log_decay = per_token ? Rows{(char *)per_token, FULMEN_FLOAT32, 1}
                                  : rows_of(call.dlog_decay, s.batch, h).from(s.first, 0);
        out.log_decay_v = rows_of(call.dlog_decay_v, s.batch, h).from(s.first, 0);
        initial = matrix_of(p.initial_state, s.state, h);
        grad_final = matrix_of(call.grad_state, s.state, h);
        // Not by its first token: after an empty segment, the next one starts at the same.
        if (segment.index == 0) dinitial = matrix_of(call.dinitial, s.state, h);
        const bool starts_empty = !p.initial_state.data && segment.first == 0;
        worker.key_gradient.start(out.log_decay, starts_empty);
        worker.value_gradient.start(out.log_decay_v, starts_empty);
    }

    // The segment's own state, or gradient of the state, from nothing.
    void summarise(Summary &state) {
        state.summarise(worker, chunks_of(s.tokens), [&](int64_t chunk) { worker.advance(chunk * kChunk, s.tokens); });
    }
    void summarise_gradient(Summary &grad_state) {
        const int64_t chunks = chunks_of(s.tokens);
        grad_state.summarise(worker, chunks,
                             [&](int64_t chunk) { worker.retreat((chunks - 1 - chunk) * kChunk, s.tokens); });
    }

    void walk_right(int64_t first, int64_t last) {
        if (!has_first_walk) return;
        if (first == 0) {
            enter(entering, initial);
            worker.round_state();
        }
        last = smaller(last, s.tokens);
        for (int64_t t = first; t < last; t += kChunk) {
            if (restarts && is_kept(t / kChunk)) memcpy(kept_state(t / kChunk).data, worker.state.data, state_bytes());
            worker.walk_right(t, smaller<int64_t>(kChunk, s.tokens - t));
        }
    }

    void walk_left(int64_t first, int64_t last) {
        if (!has_second_walk) return;
        if (last >= s.tokens && (first < s.tokens || first == 0)) {
            enter(entering_gradient, grad_final);
            worker.round_state();
        }
        last = smaller(last, s.tokens);
        for (int64_t chunk = chunks_of(last) - 1; chunk >= first / kChunk && last > first; --chunk) {
            worker.walk_left(chunk * kChunk, smaller<int64_t>(kChunk, s.tokens - chunk * kChunk),
                             restarts && is_kept(chunk) ? kept_state(chunk) : Panels{});
        }
        if (first == 0 && dinitial.present()) store_state(worker.state, p.key_size, p.value_size, dinitial);
    }

    Panels enter_state() {
        enter(entering, initial);
        return worker.state;
    }
    Panels enter_gradient() {
        enter(entering_gradient, grad_final);
        return worker.state;
    }

    HeadGradients &out() { return worker.out; }
    int64_t tokens() const { return s.tokens; }
    double &decay_sum() { return worker.key_gradient.sum; }

private:
    void enter(const Summary *summary, Matrix given) { summary ? worker.enter(summary->state()) : worker.enter(given); }
    bool is_kept(int64_t chunk) const { return (chunk + 1) % spacing == 0 || chunk + 1 == chunks_of(s.tokens); }
    int64_t state_bytes() const { return 4 * panels_size(p.key_size, p.value_size); }
    Panels kept_state(int64_t chunk) const {
        return {kept + chunk / spacing * panels_size(p.key_size, p.value_size), panel_stride(p.key_size)};
    }

    const fulmen_problem &p;
    bool restarts, has_first_walk, has_second_walk;
    BackwardWorker<Element> worker;
    int64_t most_kept, least_spacing, spacing = 0;
    float *kept = nullptr, *per_token = nullptr;
    Sequence s = {};
    const Summary *entering = nullptr, *entering_gradient = nullptr;
    Matrix initial = {}, grad_final = {}, dinitial = {};
};

// Neighbouring heads that are walked at once, chunk by chunk, as in a forward: their rows share pages. More than two
// have no more room in L2.
constexpr int64_t kTogether = 2;

template <class HeadBackward> struct Plan {
    int64_t longest, threads, heads, segments, head_bytes, group, together = 1;
    SharedGradient dq, dk, dv;
    Plan(const fulmen_attention_backward_call &call)
        : longest(longest_sequence(call.problem)),
          threads(useful_threads(call.problem, 10.0 * (double)call.problem.key_size * (double)call.problem.value_size)),
          heads(sequences_of(call.problem) * call.problem.heads),
          dq{&call.dq, call.problem.query_heads, call.problem.key_size},
          dk{&call.dk, call.problem.key_heads, call.problem.key_size},
          dv{&call.dv, call.problem.value_heads, call.problem.value_size} {
        const fulmen_problem &p = call.problem;
        group = group_of(p, {&dq, &dk, &dv});
        segments = group > 1 ? 1 : segments_for(p, heads, threads);
        threads = larger<int64_t>(1, smaller(threads, larger<int64_t>(2, segments) * heads));
        const int64_t groups = heads / kTogether;
        if (segments == 1 && p.heads % kTogether == 0 && (group == 1 || group % kTogether == 0) &&
            (groups % threads == 0 || groups >= 4 * threads))
            together = kTogether;
        Arena counting(nullptr);
        counting.place<HeadBackward>(call, longest);
        for (SharedGradient *x : {&dq, &dk, &dv}) x->reserve(counting, p, smaller(kSharedSegment, longest));
        head_bytes = counting.bytes();
    }
    Teams teams(const fulmen_problem &p) const { return Teams(p, threads, group); }
    double *sums;     // the decay gradient of each head and segment, over its tokens
    char *summaries;  // of the state and of its gradient, for each head and segment
    char *memory;     // of each head that is walked at a time
    char *queries;    // what the gradient of the queries needs by itself
    bool reserve(const fulmen_problem &p, int64_t for_queries) {
        return reserve_workspace(p.header, [&](Arena &arena) {
            reserve(arena, p);
            queries = (char *)arena.floats(for_queries / 4);
        });
    }

private:
    void reserve(Arena &arena, const fulmen_problem &p) {
        sums = (double *)arena.floats(2 * heads * segments);
        if (segments > 1)
            summaries = (char *)arena.floats(2 * heads * segments * bytes_of<Summary>(p.key_size, p.value_size) / 4);
        const int64_t of_a_team = group > 1 ? teams(p).heads : together;
        memory = (char *)arena.floats(teams(p).count * of_a_team * head_bytes / 4);
    }
};

// Heads from `first` on that are walked together; memory_of(head) is a piece of workspace for one.
template <class HeadBackward> class Neighbours {
public:
    template <class Memory>
    Neighbours(const fulmen_attention_backward_call &call, const Plan<HeadBackward> &plan, int64_t first,
               Memory memory_of)
        : count(plan.together) {
        for (int64_t i = 0; i < count; ++i) {
            Arena arena(memory_of(first + i));
            heads[i] = arena.place<HeadBackward>(call, plan.longest);
            heads[i]->start(call, first + i);
        }
    }
    HeadBackward &operator[](int64_t i) const { return *heads[i]; }

    // Tokens [first, last), or as many of them as there are.
    void walk_right(int64_t first, int64_t last) const {
        for (int64_t t = first; t < last; t += kChunk)
            for (int64_t i = 0; i < count; ++i) heads[i]->walk_right(t, t + kChunk);
    }
    void walk_left(int64_t first, int64_t last) const {
        for (int64_t t = first + (last - first - 1) / kChunk * kChunk; t >= first; t -= kChunk)
            for (int64_t i = 0; i < count; ++i) heads[i]->walk_left(t, t + kChunk);
    }

    const int64_t count;

private:
    HeadBackward *heads[kTogether];
};

// Heads that share inputs.
template <class HeadBackward>
void walk_together(const fulmen_attention_backward_call &call, const Plan<HeadBackward> &plan, const Team &team) {
    const fulmen_problem &p = call.problem;
    int64_t tokens = 1;  // a sequence without any has a state to pass on
    for (int64_t head = team.first; head < team.first + team.heads; ++head)
        tokens = larger(tokens, sequence(p, head / p.heads).tokens);
    auto walk = [&](int64_t first, auto f) {
        parallel_for(team.threads, team.heads / plan.together, [&](int64_t task, int64_t) {
            const int64_t index = team.first + task * plan.together;
            const Neighbours<HeadBackward> heads(call, plan, index, [&](int64_t head) { return team.memory_of(head); });
            for (int64_t i = 0; i < heads.count; ++i) {
                HeadGradients &out = heads[i].out();
                out.q = plan.dq.own(p, team, index + i, first, out.q);
                out.k = plan.dk.own(p, team, index + i, first, out.k);
                out.v = plan.dv.own(p, team, index + i, first, out.v);
                heads[i].decay_sum() = plan.sums[index + i];
            }
            f(heads);
            for (int64_t i = 0; i < heads.count; ++i) plan.sums[index + i] = heads[i].decay_sum();
        });
    };
    for (int64_t index = team.first; index < team.first + team.heads; ++index) plan.sums[index] = 0;
    for (int64_t first = 0; first < tokens; first += kSharedSegment) {
        const int64_t last = smaller(first + kSharedSegment, tokens);
        walk(first, [&](const Neighbours<HeadBackward> &heads) { heads.walk_right(first, last); });
        plan.dq.sum(p, team, first, last);
    }
    for (int64_t first = (tokens - 1) / kSharedSegment * kSharedSegment; first >= 0; first -= kSharedSegment) {
        const int64_t last = smaller(first + kSharedSegment, tokens);
        walk(first, [&](const Neighbours<HeadBackward> &heads) { heads.walk_left(first, last); });
        plan.dk.sum(p, team, first, last);
        plan.dv.sum(p, team, first, last);
    }
}

// Without decay gradients the two walks do not depend on each other: when heads alone do not occupy the threads evenly,
// each walk is a task of its own.
template <class HeadBackward>
void walk_alone(const fulmen_attention_backward_call &call, const Plan<HeadBackward> &plan) {
    const fulmen_problem &p = call.problem;
    const bool split = wants_first_walk(call) && wants_second_walk(call) && !wants_decays(call) &&
                       plan.heads % plan.threads != 0 && plan.heads < 4 * plan.threads;
    const int64_t groups = plan.heads / plan.together;
    parallel_for(plan.threads, split ? 2 * groups : groups, [&](int64_t task, int64_t worker) {
        const int64_t index = (split ? task / 2 : task) * plan.together;
        char *const memory = plan.memory + worker * plan.together * plan.head_bytes;
        const Neighbours<HeadBackward> heads(call, plan, index,
                                             [&](int64_t head) { return memory + (head - index) * plan.head_bytes; });
        const int64_t tokens = larger<int64_t>(1, sequence(p, index / p.heads).tokens);  // without any: a state
        if (!split || task % 2 == 1) heads.walk_right(0, tokens);
        if (!split || task % 2 == 0) heads.walk_left(0, tokens);
        for (int64_t i = 0; i < heads.count && !split; ++i) plan.sums[index + i] = heads[i].decay_sum();
    });
}

// Segments of each head at once, when heads alone do not occupy the threads.
template <class HeadBackward>
void walk_segments(const fulmen_attention_backward_call &call, const Plan<HeadBackward> &plan) {
    const fulmen_problem &p = call.problem;
    const int64_t segments = plan.segments, bytes = bytes_of<Summary>(p.key_size, p.value_size);
    auto summary_of = [&](int64_t part, bool gradient) {
        Arena arena(plan.summaries + (2 * part + gradient) * bytes);
        return Summary(arena, p.key_size, p.value_size);
    };
    auto segment_of = [&](int64_t part) {
        const int64_t n = sequence(p, part / segments / p.heads).tokens, g = part % segments;
        const int64_t first = segment_start(n, g, segments);
        return Segment{g, first, segment_start(n, g + 1, segments) - first};
    };
    auto with_head = [&](int64_t part, int64_t worker, const Segment &segment, auto f) {
        Arena arena(plan.memory + worker * plan.head_bytes);
        HeadBackward head(arena, call, plan.longest);
        head.start(call, part / segments, segment);
        f(head);
    };
    // What the last segment leaves to its right is not needed, nor what the first one leaves to its left.
    parallel_for(plan.threads, 2 * plan.heads * segments, [&](int64_t task, int64_t worker) {
        const int64_t part = task / 2, g = part % segments;
        const bool gradient = task % 2;
        if (g == (gradient ? 0 : segments - 1) || !(gradient ? wants_second_walk(call) : wants_first_walk(call)))
            return;
        Summary summary = summary_of(part, gradient);
        with_head(part, worker, segment_of(part),
                  [&](HeadBackward &head) { gradient ? head.summarise_gradient(summary) : head.summarise(summary); });
    });
    parallel_for(plan.threads, plan.heads, [&](int64_t index, int64_t worker) {
        const int64_t first = index * segments;
        with_head(first, worker, segment_of(first), [&](HeadBackward &head) {
            Panels state = head.enter_state();
            for (int64_t g = 0; g < segments && wants_first_walk(call); ++g) summary_of(first + g, false).fold(state);
            state = head.enter_gradient();
            for (int64_t g = segments - 1; g >= 0 && wants_second_walk(call); --g)
                summary_of(first + g, true).fold(state);
        });
    });
    parallel_for(plan.threads, plan.heads * segments, [&](int64_t part, int64_t worker) {
        const Summary state = summary_of(part, false), grad_state = summary_of(part, true);
        Segment segment = segment_of(part);
        segment.state = &state;
        segment.grad_state = &grad_state;
        with_head(part, worker, segment, [&](HeadBackward &head) {
            head.walk_right(0, head.tokens());
            head.walk_left(0, head.tokens());
            plan.sums[part] = head.decay_sum();
        });
    });
    for (int64_t index = 0; index < plan.heads; ++index) {
        double sum = 0;
        for (int64_t g = 0; g < segments; ++g) sum += plan.sums[index * segments + g];
        plan.sums[index] = sum;
    }
}

template <class HeadBackward> int64_t attention_backward_with(fulmen_attention_backward_call call) {
    const fulmen_problem &p = call.problem;
    Plan<HeadBackward> plan(call);
    if (query_gradient_is_attention(call)) {  // on any number of threads: bits do not depend on it
        fulmen_attention_forward_call queries = query_gradient(call);
        fulmen_header &header = queries.problem.header;
        header.workspace_bytes = attention_forward_workspace(queries);
        if (!plan.reserve(p, header.workspace_bytes)) return FULMEN_NO_WORKSPACE;
        header.workspace = plan.queries;
        attention_forward(queries);
        call.dq = {};
        if (!wants_second_walk(call)) return FULMEN_OK;
    } else if (!plan.reserve(p, 0)) {
        return FULMEN_NO_WORKSPACE;
    }
    if (plan.group > 1)
        plan.teams(p).for_each(plan.heads, plan.memory, plan.head_bytes,
                               [&](const Team &team) { walk_together(call, plan, team); });
    else if (plan.segments > 1)
        walk_segments(call, plan);
    else
        walk_alone(call, plan);
    sum_over_sequences(p, plan.sums, call.dlog_decay);
    return FULMEN_OK;
}

}  // namespace

int64_t attention_backward(const fulmen_attention_backward_call &call) {
#if FULMEN_TILES
    if (is_attention_throughout(call)) return attention_backward_in_tiles(call);
#endif
    if (wants_decays(call) || call.grad_output.dtype != call.problem.k.dtype)
        return attention_backward_with<HeadBackward<float>>(call);
    return with_element(call.problem,
                        [&](auto element) { return attention_backward_with<HeadBackward<decltype(element)>>(call); });
}

}  // namespace FULMEN_ISA
}  // namespace fulmen
