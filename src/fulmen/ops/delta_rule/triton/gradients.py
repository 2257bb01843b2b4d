"""The gradients of q, k and the decay, of all chunks in parallel, from the states, their gradients, Y and dV.

With S the state that enters a chunk, G the gradient of the one that leaves, and Wq, Wk of docs/delta_rule.md,

    dq = later(dO Sᵀ) + Wq pairs with k       dk = earlier(U Gᵀ) - later(dV Sᵀ) + what Wq and Wk give to either token

as gradients of rows that normalisation has already scaled; :func:`finish` sums heads that share rows and goes back
through the normalisation. A decay collects every pair that it stands between: inside the chunk, into it, out of it, and
across it. Nothing is subtracted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.delta_rule.triton.factors import product_of_errors, product_of_tokens, rounded_product
from fulmen.ops.delta_rule.triton.prepare import (
    ENTER,
    EPSILON,
    LEAVE,
    OF_K,
    OF_Q,
    decay_words,
    sum_of_squares,
)
from fulmen.triton_common.decays import (
    boundary_mask,
    channel_logs,
    channel_weights,
    entering_mask,
    pair_mask,
    pair_weights,
    scalar_logs,
)
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import (
    PARTITION_NUMBERS,
    Partition,
    chunk_place,
    load_column,
    load_rows,
    load_state,
    row_of,
    store_rows,
)
from fulmen.triton_common.products import sum_where


def words(differentiate: Compiled) -> tuple[str, ...]:
    return decay_words(differentiate), "and_gradient" if differentiate.has("ddecay") else ""


@triton.jit(repr=named("delta_rule_dqk", words), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def differentiate(
    q, k, decay, beta, grad, dv, errors, scores, overlaps, factors, totals,  # Tokens; grad is dO, errors is Y
    states, grad_states,  # S and G of every chunk
    dq, dk, ddecay,  # ddecay: of channels, or a column for each tile of D; None if nobody requests it
    cu_seqlens, length, segments, segment_tokens, chunks, sequences, heads,
    C: tl.constexpr, K: tl.constexpr, W: tl.constexpr, LEVELS: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    tiles = tl.cdiv(k.size, K)
    program = tl.program_id(0)
    tile, head, number = program % tiles, program // tiles % heads, program // (tiles * heads)
    batch, t, valid = chunk_place(partition, number, chunks, sequences, C)
    if valid > 0:
        chunk = number - batch * chunks
        rows, keys = tl.arange(0, C), tile * K + tl.arange(0, K)
        from_state, from_key, from_grad = (
            tl.zeros([C, K], tl.float32),
            tl.zeros([C, K], tl.float32),
            tl.zeros([C, K], tl.float32),
        )
        by_q, by_k = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        across = tl.zeros([K], tl.float32)
        for value in tl.range(0, grad.size, W, disable_licm=True):  # or addresses fill the registers
            values = value + tl.arange(0, W)
            grad_rows = load_rows(grad, batch, t, head, rows, valid, values)
            dv_rows = load_rows(dv, batch, t, head, rows, valid, values)
            y_rows = load_rows(errors, batch, t, head, rows, valid, values)
            state = load_state(states, batch, head, chunk, values, keys, grad.size, k.size)
            grad_state = load_state(grad_states, batch, head, chunk, values, keys, grad.size, k.size)
            from_state += rounded_product(grad_rows, state, PRECISION)
            from_key += rounded_product(dv_rows, state, PRECISION)
            from_grad += rounded_product(y_rows, grad_state, PRECISION)
            by_q += product_of_errors(grad_rows, tl.trans(y_rows), PRECISION)
            by_k += product_of_errors(dv_rows, tl.trans(y_rows), PRECISION)
            if ddecay is not None:
                across += tl.sum(state * grad_state, 0)

        enter = load_column(factors, batch, t, head, rows, valid, ENTER)
        leave = load_column(factors, batch, t, head, rows, valid, LEAVE)
        of_q = load_column(factors, batch, t, head, rows, valid, OF_Q)
        of_k = load_column(factors, batch, t, head, rows, valid, OF_K)
        betas = load_column(beta, batch, t, head, rows, valid, 0)
        later, earlier = rows[:, None], rows[None, :]
        by_q = tl.where(later >= earlier, by_q * betas[None, :], 0.0)
        by_k = tl.where(later > earlier, by_k * -betas[None, :], 0.0)
        q_in = from_state * (of_q * enter)[:, None]
        k_in = from_key * (-of_k * enter)[:, None]
        k_sent = from_grad * (of_k * leave * betas)[:, None]
        q_rows = load_rows(q, batch, t, head, rows, valid, keys)
        k_rows = load_rows(k, batch, t, head, rows, valid, keys)
        if ddecay is not None and DECAY != "channel":
            m = load_rows(scores, batch, t, head, rows, valid, rows).to(tl.float32)
            overlap = load_rows(overlaps, batch, t, head, rows, valid, rows).to(tl.float32)
            inside = tl.where((later > earlier) & (tile == 0), by_q * m + by_k * overlap, 0.0)
        by_q *= of_q[:, None] * of_k[None, :]
        by_k *= of_k[:, None] * of_k[None, :]

        if DECAY == "channel":
            logs = channel_logs(decay, batch, t, head, rows, valid, keys)
            weights = channel_weights(logs, entering_mask(rows, False))
            q_in *= weights
            k_in *= weights
            k_sent *= channel_weights(logs, entering_mask(rows, True))
            if ddecay is not None:
                total = load_total(totals, batch, chunk, head, keys)
                gradient = sum_where(later <= earlier, q_rows * q_in + k_rows * k_in)
                gradient += sum_where(later > earlier, k_rows * k_sent)
                gradient += (total * across)[None, :]
            itself = tl.sum(tl.where(later == earlier, by_q, 0.0), 1)[:, None]
            of_queries = q_in + itself * k_rows
            of_keys = k_in + k_sent + itself * q_rows
            for level in tl.static_range(LEVELS):
                boundary = boundary_mask(rows, level)
                weights = channel_weights(logs, boundary)
                met = pair_mask(rows, level, False)
                met_q, met_k = tl.where(met, by_q, 0.0), tl.where(met, by_k, 0.0)
                weighed = k_rows * weights
                to_queries = weights * product_of_tokens(met_q, weighed, PRECISION)
                to_keys = rounded_product(met_k + tl.trans(met_k), weighed, PRECISION)
                to_keys = weights * (to_keys + rounded_product(tl.trans(met_q), q_rows * weights, PRECISION))
                of_queries += to_queries
                of_keys += to_keys
                if ddecay is not None:
                    gradient += sum_where(tl.trans(boundary), q_rows * to_queries + k_rows * to_keys)
            if ddecay is not None:
                store_rows(ddecay, batch, t, head, rows, valid, keys, gradient)
        else:
            if DECAY != "none":
                logs = scalar_logs(decay, batch, t, head, rows, valid, DECAY == "token")
                weights = pair_weights(logs, rows, DECAY == "token", False)
                by_q *= weights
                by_k *= weights
            of_queries = q_in + product_of_tokens(by_q, k_rows, PRECISION)
            of_keys = k_in + k_sent + rounded_product(by_k + tl.trans(by_k), k_rows, PRECISION)
            of_keys += rounded_product(tl.trans(by_q), q_rows, PRECISION)
            if ddecay is not None:
                entered = tl.sum(q_rows * q_in + k_rows * k_in, 1)
                left = tl.sum(k_rows * k_sent, 1)
                total = tl.load(row_of(totals, batch, chunk, head))
                gradient = tl.sum(tl.where(later <= earlier, entered[None, :], 0.0), 1)
                gradient += tl.sum(tl.where(later > earlier, left[None, :], 0.0), 1)
                gradient += tl.sum(tl.where(later > earlier, tl.cumsum(inside, 0, reverse=True), 0.0), 1)
                gradient += total * tl.sum(across)
                tl.store(row_of(ddecay, batch, t, head) + rows * ddecay.token + tile, gradient, mask=rows < valid)
        if dq is not None:
            store_rows(dq, batch, t, head, rows, valid, keys, of_queries)
        if dk is not None:
            store_rows(dk, batch, t, head, rows, valid, keys, of_keys)


@triton.jit
def load_total(totals, batch, chunk, head, keys):
    return tl.load(row_of(totals, batch, chunk, head) + keys, mask=keys < totals.size, other=0.0)


def words_of_finish(finish: Compiled) -> tuple[str, ...]:
    return ("normalized",) if finish["NORMALIZE"] else ()


@triton.jit(repr=named("delta_rule_finish", words_of_finish), do_not_specialize=("length",))
def finish(of_heads, x, result, length, heads, C: tl.constexpr, D: tl.constexpr, NORMALIZE: tl.constexpr):
    """The gradient of x from ``of_heads``: summed over the heads that share it, and with g the sum, g - r² (x · g) x
    where x was used as r x, r = (Σx² + ε)^-1/2."""
    blocks = tl.cdiv(length, C)
    program = tl.program_id(0)
    head, block, batch = program % heads, program // heads % blocks, (program // (heads * blocks)).to(tl.int64)
    t = block.to(tl.int64) * C
    rows, columns, valid = tl.arange(0, C), tl.arange(0, D), length - t
    share = x.share
    total = tl.zeros([C, D], tl.float32)
    for other in range(0, share):
        total += load_rows(of_heads, batch, t, head * share + other, rows, valid, columns)
    if NORMALIZE:
        x_rows = load_rows(x, batch, t, head * share, rows, valid, columns).to(tl.float32)
        along = tl.sum(x_rows * total, 1) / (sum_of_squares(x_rows) + EPSILON)
        total -= along[:, None] * x_rows
    store_rows(result, batch, t, head * share, rows, valid, columns, total)
