"""What does not depend on the state, of all chunks in parallel: pairs of tokens, their inverse, rows and their weights.

    L_ij = k_i · (w_ij k_j) for j < i      M_ij = scale q_i · (w_ij k_j) for j ≤ i
    X = (I + L diag(β))⁻¹                  R = X later(k)

A β of 0 counts as SMALLEST_BETA in X, of which it scales a column: as good as 0 there, and the walk back can divide by
it. R holds the rows that read the state: Y = X V - R S. It is found in float32 and then rounded, because X takes away
what keys that are alike have in common; in X (V - later(k) S) that would be what was rounded.

Other rows stay as they are in memory, so that nothing is rounded: what normalisation and a scalar decay weigh them by
are factors of the products' results. Only a decay per channel weighs the rows themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.ops.delta_rule.triton.factors import product_of_tokens, rounded_product
from fulmen.triton_common.decays import (
    boundary_mask,
    channel_logs,
    channel_weights,
    entering_mask,
    pair_mask,
    pair_weights,
    scalar_logs,
    scalar_weights,
)
from fulmen.triton_common.naming import Compiled, named
from fulmen.triton_common.operands import (
    PARTITION_NUMBERS,
    Partition,
    chunk_place,
    load_column,
    load_rows,
    row_of,
    store_rows,
)
from fulmen.triton_common.products import ONE_TERM, product

# Beside the sum of squares that normalisation divides by; as problem.EPSILON.
EPSILON = tl.constexpr(1e-6)
# The columns of the factors: of q (with the scale) and of k alone, and what a scalar decay leaves of the state that
# enters, up to each token, and of a token in the state that leaves.
OF_Q = tl.constexpr(0)
OF_K = tl.constexpr(1)
ENTER = tl.constexpr(2)
LEAVE = tl.constexpr(3)
FACTORS = 4
BLOCK = tl.constexpr(16)  # of the inverse: tokens that are substituted one by one
SMALLEST_BETA = tl.constexpr(2.0**-40)


def words(prepare: Compiled) -> tuple[str, ...]:
    return decay_words(prepare), "with_overlaps" if prepare.has("overlaps") else ""


def decay_words(kernel: Compiled) -> str:
    return "no_decay" if kernel["DECAY"] == "none" else f"{kernel['DECAY']}_decay"


@triton.jit(repr=named("delta_rule_prepare", words), do_not_specialize_on_alignment=PARTITION_NUMBERS)
def prepare(
    q, k, beta, decay,  # Tokens
    inverse, scores, overlaps,  # X, M and L, a row for each token; L may be None
    factors, totals,  # of rows, and of the state over a chunk
    reads,  # R
    q_in, k_out,  # rows that a channel decay weighs, or None
    cu_seqlens, length, segments, segment_tokens, chunks, sequences, heads, scale,
    C: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr,
    DECAY: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    partition = Partition(cu_seqlens, length, segments, segment_tokens)
    program = tl.program_id(0)
    head, number = program % heads, program // heads
    batch, t, valid = chunk_place(partition, number, chunks, sequences, C)
    if valid > 0:
        rows = tl.arange(0, C)
        same = rows[:, None] == rows[None, :]
        of_q, of_k = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        of_pairs, between = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        chunk = row_of(totals, batch, number - batch * chunks, head) if totals is not None else None
        for channel in range(0, q.size, K):
            columns = channel + tl.arange(0, K)
            q_rows = load_rows(q, batch, t, head, rows, valid, columns)
            k_rows = load_rows(k, batch, t, head, rows, valid, columns)
            if NORMALIZE:
                of_q += sum_of_squares(q_rows)
                of_k += sum_of_squares(k_rows)
            if DECAY == "channel":
                logs = channel_logs(decay, batch, t, head, rows, valid, columns)
                enter = channel_weights(logs, entering_mask(rows, False))
                leave = channel_weights(logs, entering_mask(rows, True))
                store_rows(q_in, batch, t, head, rows, valid, columns, q_rows * enter)
                store_rows(k_out, batch, t, head, rows, valid, columns, k_rows * leave)
                tl.store(chunk + columns, tl.exp(tl.sum(logs, 0)), mask=columns < q.size)
                itself = tl.sum(q_rows.to(tl.float32) * k_rows.to(tl.float32), 1)
                of_pairs += tl.where(same, itself[:, None], 0.0)
                for level in tl.static_range(LEVELS):
                    weights = channel_weights(logs, boundary_mask(rows, level))
                    met = pair_mask(rows, level, False)
                    earlier = tl.trans(k_rows * weights)
                    if PRECISION == ONE_TERM:  # of the two keys of a pair one has two
                        earlier = earlier.to(tl.bfloat16)
                    of_pairs += tl.where(met, rounded_product(q_rows * weights, earlier, PRECISION), 0.0)
                    between += tl.where(met, product_of_tokens(k_rows * weights, earlier, PRECISION), 0.0)
            else:
                of_pairs += rounded_product(q_rows, tl.trans(k_rows), PRECISION)
                between += rounded_product(k_rows, tl.trans(k_rows), PRECISION)
        if NORMALIZE:
            of_q, of_k = tl.rsqrt(of_q + EPSILON) * scale, tl.rsqrt(of_k + EPSILON)
        else:
            of_q, of_k = of_q + scale, of_k + 1.0
        enter, leave = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
        if DECAY == "head" or DECAY == "token":
            logs = scalar_logs(decay, batch, t, head, rows, valid, DECAY == "token")
            enter = scalar_weights(logs, entering_mask(rows, False))
            leave = scalar_weights(logs, entering_mask(rows, True))
            tl.store(chunk, tl.exp(tl.sum(logs)))
            weights = pair_weights(logs, rows, DECAY == "token", False)
            of_pairs *= weights
            between *= weights
        into = row_of(factors, batch, t, head) + rows * factors.token
        tl.store(into + OF_Q, of_q, mask=rows < valid)
        tl.store(into + OF_K, of_k, mask=rows < valid)
        tl.store(into + ENTER, enter, mask=rows < valid)
        tl.store(into + LEAVE, leave, mask=rows < valid)

        of_pairs = tl.where(rows[:, None] >= rows[None, :], of_pairs * of_q[:, None] * of_k[None, :], 0.0)
        between = tl.where(rows[:, None] > rows[None, :], between * of_k[:, None] * of_k[None, :], 0.0)
        store_rows(scores, batch, t, head, rows, valid, rows, of_pairs)
        if overlaps is not None:
            store_rows(overlaps, batch, t, head, rows, valid, rows, between)
        betas = load_column(beta, batch, t, head, rows, valid, 0)
        found = inverse_of(between * nonzero(betas)[None, :], rows, C, SINGLE)
        store_rows(inverse, batch, t, head, rows, valid, rows, found)
        found *= (of_k * enter)[None, :]
        for channel in range(0, q.size, K):
            columns = channel + tl.arange(0, K)
            k_rows = load_rows(k, batch, t, head, rows, valid, columns)
            if DECAY == "channel":
                logs = channel_logs(decay, batch, t, head, rows, valid, columns)
                k_rows = k_rows * channel_weights(logs, entering_mask(rows, False))
            store_rows(reads, batch, t, head, rows, valid, columns, product(found, k_rows, SINGLE))


@triton.jit
def nonzero(betas):
    return tl.where(tl.abs(betas) < SMALLEST_BETA, SMALLEST_BETA, betas)


@triton.jit
def sum_of_squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, 1)


@triton.jit
def inverse_of(below, rows, C: tl.constexpr, SINGLE: tl.constexpr):
    """``[C, C]``: (I + ``below``)⁻¹, in float32, of what lies below the diagonal.

    By forward substitution: row i is e_i - Σ_{j<i} below_ij (row j), in blocks of 16 tokens all at once. Two blocks on
    the diagonal then make one of twice the size, with -X₂ below₂₁ X₁ between them.
    """
    BLOCKS: tl.constexpr = C // BLOCK
    one, other = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, BLOCKS)[None, None, :, None]
    on_diagonal = one == other
    blocks = tl.sum(tl.where(on_diagonal, tl.reshape(below, [BLOCKS, BLOCK, BLOCKS, BLOCK]), 0.0), 2)
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    found = tl.broadcast_to(tl.where(row == column, 1.0, 0.0), [BLOCKS, BLOCK, BLOCK])
    for i in range(1, BLOCK):
        weights = tl.sum(tl.where(row == i, blocks, 0.0), 1)
        taken = tl.sum(weights[:, :, None] * found, 1)
        found = tl.where(row == i, found - taken[:, None, :], found)
    spread = tl.broadcast_to(found[:, :, None, :], [BLOCKS, BLOCK, BLOCKS, BLOCK])
    result = tl.reshape(tl.where(on_diagonal, spread, 0.0), [C, C])
    if BLOCKS > 1:
        result = joined(result, below, rows, 4, SINGLE)
    if BLOCKS > 2:
        result = joined(result, below, rows, 5, SINGLE)
    return result


@triton.jit
def joined(result, below, rows, level: tl.constexpr, SINGLE: tl.constexpr):
    between = tl.where(pair_mask(rows, level, False), below, 0.0)
    return result - product(result, product(between, result, SINGLE), SINGLE)
