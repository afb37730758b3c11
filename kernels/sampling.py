"""The choice of a token from logits [R, V]: the best one, or a draw by temperature, top-k and top-p with a
given uniform number.

Owns no randomness: the number of each row comes from (seed, request id, position), see
`cbviz.model.sampling`, whose choice these equal.

Graph-safe: parameters and numbers come from the device.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["parts"])
def best_of_part(logits, best, index, second, total, parts, l_r, V: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (R, parts).

    Of each BLOCK of a row, to [R, parts]: the largest logit, its smallest index, the next largest (at another
    index), the sum of exp(logit - largest).
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * l_r + i, mask=i < V, other=-float("inf"))
    top = tl.max(x, 0)
    at = tl.min(tl.where((x == top) & (i < V), i, 2147483647), 0)
    to = row * parts + tl.program_id(1)
    tl.store(best + to, top)
    tl.store(index + to, at)
    tl.store(second + to, tl.max(tl.where(i == at, -float("inf"), x), 0))
    tl.store(total + to, tl.sum(tl.exp(x - tl.where(top == -float("inf"), 0.0, top)), 0))


@triton.jit(do_not_specialize=["parts"])
def best_of_row(best, index, second, total, out, parts, V: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (R): from the parts to out [R, 3] float64: the best index, its lead over the second (0 if V is 1),
    log of the sum of exponentials.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    at = row * parts + i
    x = tl.load(best + at, mask=i < parts, other=-float("inf"))
    where = tl.load(index + at, mask=i < parts, other=2147483647)
    top = tl.max(x, 0)
    chosen = tl.minimum(
        tl.min(tl.where(x == top, where, 2147483647), 0), V - 1
    )  # of a row of NaN any: who looks its logit up must find NaN, not leave the row
    others = tl.where(where == chosen, tl.load(second + at, mask=i < parts, other=-float("inf")), x)
    lead = top - tl.max(others, 0) if V > 1 else top * 0.0
    share = tl.load(total + at, mask=i < parts, other=0.0) * tl.exp(x - top)
    tl.store(out + row * 3, chosen.to(tl.float64))
    tl.store(out + row * 3 + 1, lead.to(tl.float64))
    tl.store(out + row * 3 + 2, (top + tl.log(tl.sum(tl.where(i < parts, share, 0.0), 0))).to(tl.float64))


@triton.jit
def draw(values, ids, temperature, top_k, top_p, uniform, out, v_r, V: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (R). values, ids [R, V]: logits in falling order and their ids (ties: smaller id first). out [R]
    int64.

    Of the top_k best (0: all), the fewest whose probabilities reach top_p; of these the first whose
    cumulative probability exceeds `uniform`. temperature 0: the best. All sums are float64, as in
    `cbviz.model.sampling.filtered_probs`.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    t = tl.load(temperature + row)
    t = tl.where(t > 0.0, t, 1.0)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    count = tl.where((k > 0) & (k < V), k, V).to(tl.int32)
    top = tl.load(values + row * v_r).to(tl.float64) / t
    total = 0.0
    total = total.to(tl.float64)
    for start in range(0, count, BLOCK):
        x = (
            tl.load(values + row * v_r + start + i, mask=start + i < count, other=-float("inf")).to(
                tl.float64
            )
            / t
        )
        total += tl.sum(tl.exp(x - top), 0)
    if p < 1.0:  # how many are kept, and what they sum up to
        kept = 0
        before = total * 0.0
        kept_total = total * 0.0
        for start in range(0, count, BLOCK):
            x = (
                tl.load(values + row * v_r + start + i, mask=start + i < count, other=-float("inf")).to(
                    tl.float64
                )
                / t
            )
            w = tl.exp(x - top) / total
            inside = (before + tl.cumsum(w, 0) - w < p) & (start + i < count)
            kept += tl.sum(inside.to(tl.int32), 0)
            kept_total += tl.sum(tl.where(inside, w, 0.0), 0)
            before += tl.sum(w, 0)
        total = total * kept_total
        count = kept
    wanted = tl.load(uniform + row) * total
    passed = 0
    before = total * 0.0
    for start in range(0, count, BLOCK):
        x = (
            tl.load(values + row * v_r + start + i, mask=start + i < count, other=-float("inf")).to(
                tl.float64
            )
            / t
        )
        w = tl.exp(x - top)
        passed += tl.sum(((before + tl.cumsum(w, 0) <= wanted) & (start + i < count)).to(tl.int32), 0)
        before += tl.sum(w, 0)
    at = tl.where(
        tl.load(temperature + row) > 0.0, tl.maximum(tl.minimum(passed, count - 1), 0), 0
    )  # of a row of NaN none is kept
    tl.store(out + row, tl.load(ids + row * v_r + at))
