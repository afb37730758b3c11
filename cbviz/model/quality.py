"""How far a faster or smaller mode lies from float32: measured on given token sequences, never assumed.

Owns the measures; knows no files and no workloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cbviz.model import ops
from cbviz.model.decoder import Decoder
from cbviz.model.kv_store import STORAGE
from cbviz.model.loader import LoadedModel
from cbviz.model.ops import Batch

_BLOCK = 16
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Quality:
    """Against float32 with the same operators, every position given the same tokens before it.

    `max_logit_error`: largest difference of a logit; `rms_logit_error`: root of the mean square; `agreement`:
    share of positions with the same best token; `lead_lost`: the largest lead in nats that float32's best
    token had where the best differs (0: none differs).
    """

    precision: str
    positions: int
    max_logit: float
    max_logit_error: float
    rms_logit_error: float
    agreement: float
    lead_lost: float


@dataclass(frozen=True, slots=True)
class KVQuality:
    """What keeping keys and values otherwise does to the words said, against float32 keys and values and full
    attention. Every position is given the same tokens before it.

    `logprob`: mean log-probability of the tokens that stand there, nats; `logprob_change`: its change, below
    0 where they have become less likely; `divergence`: mean Kullback-Leibler distance, nats; `agreement`:
    share of positions with the same best token. `bytes_per_token`: of keys and values, all layers.
    """

    kv_cache_dtype: str
    bytes_per_token: int
    positions: int
    logprob: float
    logprob_change: float
    divergence: float
    agreement: float


def kv_quality(
    model: LoadedModel,
    kv_cache_dtype: str,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    window: int = 0,
    sinks: int = 0,
    kernels: str = "auto",
) -> KVQuality:
    """Over pairs (prompt, what follows); the tokens that follow are judged.

    Weights and arithmetic are float32 throughout. The model must lie on the CPU.
    """
    chosen = ops.pick(kernels, "cpu")
    exact, other = model.decoder(chosen), model.decoder(chosen, window, "exact", sinks)
    positions = same = 0
    said = change = apart = 0.0
    for prompt, rest in sequences:
        ids = [*prompt, *rest]
        told = torch.tensor(rest)[:, None]
        here = slice(len(prompt) - 1, len(ids) - 1)
        a, b = (
            _logits(d, ids, t)[here].log_softmax(-1)
            for d, t in ((exact, torch.float32), (other, STORAGE[kv_cache_dtype]))
        )
        mine, theirs = a.gather(1, told), b.gather(1, told)
        positions += len(rest)
        said, change = said + float(theirs.sum()), change + float((theirs - mine).sum())
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        apart += float((a.exp() * (a - b)).sum())
    n = max(1, positions)
    return KVQuality(
        kv_cache_dtype,
        model.config.store(1, 1, dtype=STORAGE[kv_cache_dtype]).bytes_per_token,
        positions,
        said / n,
        change / n,
        apart / n,
        same / n,
    )


def surprise(
    model: LoadedModel,
    ids: Sequence[int],
    *,
    window: int = 0,
    sinks: int = 0,
    kv_cache_dtype: str = "float32",
    kernels: str = "auto",
) -> torch.Tensor:
    """-log-probability in nats of each token but the first, given all before it that attention lets it see:
    [len(ids) - 1] float32. exp of a mean is a perplexity.
    """
    decoder = model.decoder(ops.pick(kernels, "cpu"), window, "exact", sinks)
    c, size = decoder.config, -(-len(ids) // _BLOCK)
    kv = c.store(size, _BLOCK, dtype=STORAGE[kv_cache_dtype])
    out = []
    for start in range(0, len(ids), _CHUNK):  # a long text a piece at a time: its logits would not fit
        part = ids[start : start + _CHUNK]
        batch = Batch.build([list(range(size))], [len(part)], [start + len(part)], _BLOCK)
        told = torch.tensor(ids[start + 1 : start + len(part) + 1])
        logits = decoder.forward(
            torch.tensor(part), torch.arange(start, start + len(part)), batch, kv, torch.arange(len(told))
        )
        out.append(-logits.log_softmax(-1).gather(1, told[:, None])[:, 0])
    return torch.cat(out)


def quality(
    model: LoadedModel, precision: str, sequences: Sequence[Sequence[int]], *, kernels: str = "auto"
) -> Quality:
    """Runs each sequence through both modes and compares the logits of all its positions.

    The model must lie on the CPU.
    """
    chosen = ops.pick(kernels, "cpu")
    exact, other = model.decoder(chosen), model.decoder(chosen, 0, precision)
    positions = same = 0
    most = worst = squares = lost = 0.0
    for ids in sequences:
        a, b = (
            _logits(exact, ids, torch.float32),
            _logits(other, ids, torch.float32 if precision == "exact" else torch.float16),
        )
        best, theirs = a.argmax(-1), b.argmax(-1)
        lead = (a.gather(1, best[:, None]) - a.gather(1, theirs[:, None]))[:, 0]
        positions += len(ids)
        same += int((best == theirs).sum())
        most, worst, lost = (
            max(most, float(a.abs().max())),
            max(worst, float((a - b).abs().max())),
            max(lost, float(lead.max())),
        )
        squares += float((a - b).square().mean(-1).sum())
    return Quality(
        precision,
        positions,
        most,
        worst,
        (squares / max(1, positions)) ** 0.5,
        same / max(1, positions),
        lost,
    )


def _logits(decoder: Decoder, ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    c, n = decoder.config, len(ids)
    blocks = (n + _BLOCK - 1) // _BLOCK
    kv = c.store(blocks, _BLOCK, dtype=dtype)
    every = torch.arange(n)
    return decoder.forward(
        torch.tensor(ids, dtype=torch.int64),
        every,
        Batch.build([list(range(blocks))], [n], [n], _BLOCK),
        kv,
        every,
    )
