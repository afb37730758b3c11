"""Attention over the paged KV cache: decodes, whose keys are split over programs, and chunks of prompts over
what is cached.

Owns the two kernels and the one that joins the parts; who launches them, and with which tiles, is
`cbviz.model.triton_ops` and `tiles`.

    q [T, H, D]     k_cache, v_cache [num_blocks, H_kv, BLOCK_SIZE, D]    block_table [B, max_blocks] int32, -1 where there is nothing
    query_start [B+1] int32: a sequence's first token in q    seq_lens [B] int32: its keys, this step's included; 0: no sequence

A query at position i sees key j if j <= i and, under a window, i - window < j or j < sinks. A head may also
have a learned logit that takes part in the softmax and brings no value (GPT-OSS).

Graph-safe: `decode` and `join` read lengths, tables and places from the device only. Their grids follow from
the number of sequences, heads and the table's width, so a captured launch holds for every content. The grid
of `prefill` follows from the longest chunk: not for graphs.

One row of the dot products is one query head of one token; the heads that share a key head stand in one tile
and share its loads. A sequence's keys are cut at multiples of SPLIT_KEYS, whoever else is in the batch, so a
decode's result does not depend on its batch-mates, bit for bit. Splits, online softmax and the join by
log-sum-exp are those of FlashAttention-2 and Flash-Decoding (Dao 2023).

With KV_BITS 8 and 4 the caches hold the codes of `cbviz.model.kv_store`: a scale a token and head, with 4
bits also a zero, [num_blocks, H_kv, BLOCK_SIZE], and two codes a byte (i low, D/2 + i high). Scales and zeros
are applied to scores and weights, which are fewer than the numbers of keys and values, and codes are exact in
16 bits:

    q . (code * scale + zero) = (q . code) * scale + sum(q) * zero        w . (code * scale + zero) = (w * scale) . code + (w . zero)
"""

from __future__ import annotations

import triton
import triton.language as tl

TYPES = {"torch.float32": tl.float32, "torch.float16": tl.float16, "torch.bfloat16": tl.bfloat16}
"""Types that products can be taken in, by torch's names."""


@triton.jit
def _load_keys(
    cache,
    at,
    slot_ok,
    d,
    D: tl.constexpr,
    KV_BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    KEYS_LAST: tl.constexpr,
):
    """One tile of keys [D, TILE] (KEYS_LAST) or values [TILE, D] in DTYPE.

    `at`: the slots' places in the cache.
    """
    if KV_BITS == 4:
        byte = d % (D // 2)
    else:
        byte = d
    if KEYS_LAST:
        x = tl.load(cache + at[None, :] + byte[:, None], mask=slot_ok[None, :] & (d < D)[:, None], other=0)
        high = (d >= D // 2)[:, None]
    else:
        x = tl.load(cache + at[:, None] + byte[None, :], mask=slot_ok[:, None] & (d < D)[None, :], other=0)
        high = (d >= D // 2)[None, :]
    if KV_BITS == 4:
        x = tl.where(high, x >> 4, x & 15)
    return x.to(DTYPE)


@triton.jit
def _attend(
    q,
    best,
    total,
    acc,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    k_zero,
    v_zero,
    table,
    pos,
    slot_ok,
    seen,
    head,
    d,
    scale2,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    s_b,
    s_h,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_BITS: tl.constexpr,
):
    """One step of the online softmax (base 2) over the keys at `pos` [TILE].

    `seen` [rows, TILE]: which row looks at which key.
    """
    block = tl.load(table + pos // BLOCK_SIZE, mask=slot_ok, other=0).to(
        tl.int64
    )  # 64 bits: a large pool has more than 2^31 numbers
    offset = pos % BLOCK_SIZE
    k = _load_keys(k_cache, block * k_b + head * k_h + offset * k_s, slot_ok, d, D, KV_BITS, q.dtype, True)
    v = _load_keys(v_cache, block * v_b + head * v_h + offset * v_s, slot_ok, d, D, KV_BITS, q.dtype, False)
    scores = tl.dot(q, k, input_precision="ieee")
    if KV_BITS <= 8:
        beside = block * s_b + head * s_h + offset
        scores *= tl.load(k_scale + beside, mask=slot_ok, other=0.0).to(tl.float32)[None, :]
    if KV_BITS == 4:
        scores += (
            tl.sum(q.to(tl.float32), 1)[:, None]
            * tl.load(k_zero + beside, mask=slot_ok, other=0.0).to(tl.float32)[None, :]
        )
    scores = tl.where(seen, scores * scale2, -float("inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(
        higher == -float("inf"), 0.0, higher
    )  # a row that has seen nothing yet stays 0 and never becomes NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    if KV_BITS == 4:
        acc += tl.sum(weights * tl.load(v_zero + beside, mask=slot_ok, other=0.0).to(tl.float32)[None, :], 1)[
            :, None
        ]
    if KV_BITS <= 8:
        weights *= tl.load(v_scale + beside, mask=slot_ok, other=0.0).to(tl.float32)[None, :]
    acc += tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    return higher, total, acc


@triton.jit(do_not_specialize=["window", "sinks", "t_b", "room"])
def decode(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    k_zero,
    v_zero,
    block_table,
    query_start,
    seq_lens,
    sink_logits,
    out,
    part,
    part_lse,
    scale2,
    window,
    sinks,
    t_b,
    room,
    q_t,
    q_h,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    s_b,
    s_h,
    o_t,
    o_h,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
    KV_BITS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Grid (B, H_kv, splits).

    Sequences of at most ROWS // GROUPS query tokens; the others are left to `prefill`.

    WHOLE: the table is no wider than one split, and the result goes to `out` at once. Otherwise to part [B,
    room, H, splits, BLOCK_D] and part_lse [B, room, H, splits], float32, for `join`; a split without keys
    writes nothing. `room`: the most query tokens of those sequences.
    """
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    first = tl.load(query_start + b)
    num_queries = tl.load(query_start + b + 1) - first
    length = tl.load(seq_lens + b)
    if (num_queries > 0) & (num_queries <= ROWS // GROUPS):
        row = tl.arange(0, ROWS)
        token = row // GROUPS
        row_ok = token < num_queries
        position = length - num_queries + token
        heads = head * GROUPS + row % GROUPS
        d = tl.arange(0, BLOCK_D)
        lo = split * SPLIT_KEYS
        hi = tl.minimum(lo + SPLIT_KEYS, length)
        if WINDOWED:
            left = (
                tl.maximum(length - num_queries - window + 1, 0) // TILE * TILE
            )  # TILE divides SPLIT_KEYS: tiles lie alike with and without a window
            lo = tl.where(lo >= sinks, tl.maximum(lo, left), lo)
        if WHOLE | (lo < hi):
            place = (first + token).to(tl.int64)
            x = tl.load(
                q + place[:, None] * q_t + heads[:, None] * q_h + d[None, :],
                mask=row_ok[:, None] & (d < D)[None, :],
                other=0.0,
            ).to(DTYPE)
            best = tl.full([ROWS], -float("inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
            for start in range(lo, hi, TILE):
                pos = start + tl.arange(0, TILE)
                slot_ok = pos < hi
                seen = slot_ok[None, :] & (pos[None, :] <= position[:, None])
                if WINDOWED:
                    seen = seen & ((pos[None, :] > position[:, None] - window) | (pos[None, :] < sinks))
                    slot_ok = slot_ok & (
                        (pos > length - num_queries - window) | (pos < sinks)
                    )  # blocks left of the window may be gone
                best, total, acc = _attend(
                    x,
                    best,
                    total,
                    acc,
                    k_cache,
                    v_cache,
                    k_scale,
                    v_scale,
                    k_zero,
                    v_zero,
                    block_table + b * t_b,
                    pos,
                    slot_ok,
                    seen,
                    head,
                    d,
                    scale2,
                    k_b,
                    k_h,
                    k_s,
                    v_b,
                    v_h,
                    v_s,
                    s_b,
                    s_h,
                    D,
                    BLOCK_SIZE,
                    KV_BITS,
                )
            if WHOLE:
                if SINK_LOGITS:
                    logit = (
                        tl.load(sink_logits + heads, mask=row_ok, other=0.0).to(tl.float32)
                        * 1.4426950408889634
                    )
                    higher = tl.maximum(best, logit)
                    acc = acc * tl.exp2(best - higher)[:, None]
                    total = total * tl.exp2(best - higher) + tl.exp2(logit - higher)
                y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
                tl.store(
                    out + place[:, None] * o_t + heads[:, None] * o_h + d[None, :],
                    y.to(out.dtype.element_ty),
                    mask=row_ok[:, None] & (d < D)[None, :],
                )
            else:
                at = ((b * room + token) * GROUPS * tl.num_programs(1) + heads) * tl.num_programs(2) + split
                safe = tl.where(total == 0.0, 1.0, total)
                tl.store(
                    part + at[:, None] * BLOCK_D + d[None, :],
                    acc / safe[:, None],
                    mask=row_ok[:, None] & (d < D)[None, :],
                )
                tl.store(
                    part_lse + at, tl.where(total == 0.0, -float("inf"), best + tl.log2(safe)), mask=row_ok
                )


@triton.jit(do_not_specialize=["window", "sinks", "splits", "room", "most_q"])
def join(
    part,
    part_lse,
    query_start,
    seq_lens,
    sink_logits,
    out,
    window,
    sinks,
    splits,
    room,
    most_q,
    o_t,
    o_h,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
):
    """Grid (B * room, H).

    Joins the parts of `decode` that have keys, weighted by their share of the softmax's sum. `most_q`: its
    ROWS // GROUPS.
    """
    b = (tl.program_id(0) // room).to(tl.int64)
    token = tl.program_id(0) % room
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(query_start + b)
    num_queries = tl.load(query_start + b + 1) - first
    length = tl.load(seq_lens + b)
    if (token < num_queries) & (num_queries <= most_q):
        split = tl.arange(0, BLOCK_SPLITS)
        d = tl.arange(0, BLOCK_D)
        lo = split * SPLIT_KEYS
        live = (split < splits) & (lo < length)
        if WINDOWED:
            live = live & (
                (lo < sinks)
                | (lo + SPLIT_KEYS > tl.maximum(length - num_queries - window + 1, 0) // TILE * TILE)
            )
        at = ((b * room + token) * H + head) * splits + split
        lse = tl.load(part_lse + at, mask=live, other=-float("inf"))
        top = tl.max(lse, 0)
        if SINK_LOGITS:
            logit = tl.load(sink_logits + head).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, logit)
        top = tl.where(top == -float("inf"), 0.0, top)
        share = tl.exp2(lse - top)
        total = tl.sum(share, 0)
        if SINK_LOGITS:
            total += tl.exp2(logit - top)
        share = share / tl.where(total == 0.0, 1.0, total)
        x = tl.load(
            part + at[:, None] * BLOCK_D + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
        )
        tl.store(
            out + (first + token).to(tl.int64) * o_t + head * o_h + d,
            tl.sum(x * share[:, None], 0).to(out.dtype.element_ty),
            mask=d < D,
        )


@triton.jit(do_not_specialize=["window", "sinks", "t_b", "least_q"])
def prefill(
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    k_zero,
    v_zero,
    block_table,
    query_start,
    seq_lens,
    sink_logits,
    out,
    scale2,
    window,
    sinks,
    t_b,
    least_q,
    q_t,
    q_h,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    s_b,
    s_h,
    o_t,
    o_h,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
    KV_BITS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Grid (tiles of the longest chunk, H_kv, B): chunks of at least least_q tokens, each ROWS // GROUPS
    tokens a program.

    Tiles of keys lie at multiples of TILE, and a row's masked keys change nothing: how a prompt was cut into
    chunks does not show in a row.
    """
    b = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    TOKENS: tl.constexpr = ROWS // GROUPS
    first = tl.load(query_start + b)
    num_queries = tl.load(query_start + b + 1) - first
    length = tl.load(seq_lens + b)
    begin = tl.program_id(0) * TOKENS
    if (num_queries >= least_q) & (begin < num_queries):
        row = tl.arange(0, ROWS)
        token = begin + row // GROUPS
        row_ok = (row < TOKENS * GROUPS) & (token < num_queries)
        position = length - num_queries + token
        heads = head * GROUPS + row % GROUPS
        d = tl.arange(0, BLOCK_D)
        place = (first + token).to(tl.int64)
        x = tl.load(
            q + place[:, None] * q_t + heads[:, None] * q_h + d[None, :],
            mask=row_ok[:, None] & (d < D)[None, :],
            other=0.0,
        ).to(DTYPE)
        best = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        end = (
            length - num_queries + tl.minimum(begin + TOKENS, num_queries)
        )  # keys up to the tile's last query
        tiles = tl.cdiv(end, TILE)
        lead = 0
        skipped = 0
        left = 0
        if WINDOWED:
            left = tl.maximum(
                length - num_queries + begin - window + 1, 0
            )  # first key in the window of the tile's first query
            lead = tl.minimum(tl.cdiv(sinks, TILE), tiles)
            skipped = tl.maximum(left // TILE - lead, 0)
        for i in range(tiles - skipped):
            pos = (i + tl.where(i >= lead, skipped, 0)) * TILE + tl.arange(0, TILE)
            slot_ok = pos < end
            seen = slot_ok[None, :] & (pos[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & ((pos[None, :] > position[:, None] - window) | (pos[None, :] < sinks))
                slot_ok = slot_ok & ((pos >= left) | (pos < sinks))
            best, total, acc = _attend(
                x,
                best,
                total,
                acc,
                k_cache,
                v_cache,
                k_scale,
                v_scale,
                k_zero,
                v_zero,
                block_table + b * t_b,
                pos,
                slot_ok,
                seen,
                head,
                d,
                scale2,
                k_b,
                k_h,
                k_s,
                v_b,
                v_h,
                v_s,
                s_b,
                s_h,
                D,
                BLOCK_SIZE,
                KV_BITS,
            )
        if SINK_LOGITS:
            logit = tl.load(sink_logits + heads, mask=row_ok, other=0.0).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(best, logit)
            acc = acc * tl.exp2(best - higher)[:, None]
            total = total * tl.exp2(best - higher) + tl.exp2(logit - higher)
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + place[:, None] * o_t + heads[:, None] * o_h + d[None, :],
            y.to(out.dtype.element_ty),
            mask=row_ok[:, None] & (d < D)[None, :],
        )
