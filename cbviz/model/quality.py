"""How far a faster mode lies from float32: measured on given token sequences, never assumed. Owns the measure; knows no files and no workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cbviz.model import ops
from cbviz.model.decoder import Decoder
from cbviz.model.loader import LoadedModel
from cbviz.model.ops import Batch

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Quality:
    """Against float32 with the same operators, every position given the same tokens before it.

    `max_logit_error`: largest difference of a logit; `rms_logit_error`: root of the mean square; `agreement`: share of positions with the
    same best token; `lead_lost`: the largest lead in nats that float32's best token had where the best differs (0: none differs).
    """

    precision: str
    positions: int
    max_logit: float
    max_logit_error: float
    rms_logit_error: float
    agreement: float
    lead_lost: float


def quality(model: LoadedModel, precision: str, sequences: Sequence[Sequence[int]], *, kernels: str = "auto") -> Quality:
    """Runs each sequence through both modes and compares the logits of all its positions. The model must lie on the CPU."""
    chosen = ops.pick(kernels, "cpu")
    exact, other = model.decoder(chosen), model.decoder(chosen, 0, precision)
    positions = same = 0
    most = worst = squares = lost = 0.0
    for ids in sequences:
        a, b = _logits(exact, ids, torch.float32), _logits(other, ids, torch.float32 if precision == "exact" else torch.float16)
        best, theirs = a.argmax(-1), b.argmax(-1)
        lead = (a.gather(1, best[:, None]) - a.gather(1, theirs[:, None]))[:, 0]
        positions += len(ids)
        same += int((best == theirs).sum())
        most, worst, lost = max(most, float(a.abs().max())), max(worst, float((a - b).abs().max())), max(lost, float(lead.max()))
        squares += float((a - b).square().mean(-1).sum())
    return Quality(precision, positions, most, worst, (squares / max(1, positions)) ** 0.5, same / max(1, positions), lost)


def _logits(decoder: Decoder, ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    c, n = decoder.config, len(ids)
    blocks = (n + _BLOCK - 1) // _BLOCK
    kv = c.store(blocks, _BLOCK, dtype=dtype)
    every = torch.arange(n)
    return decoder.forward(torch.tensor(ids, dtype=torch.int64), every, Batch.build([list(range(blocks))], [n], [n], _BLOCK), kv, every)
