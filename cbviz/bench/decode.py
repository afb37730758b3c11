"""Decode steps alone: one new token for each of some requests at the same contexts, ours in each precision
and llama.cpp in turn in one run.

Like for like: what is timed is the decode call until its logits are there. On llama.cpp's side that is
`llama_decode` and the logits' pointers; on ours the pass with the tables that it is given (`_forward`).
Neither side's choice of tokens, queue, checks or ledger is in it; our whole step, with all of that, stands
beside it. The floor of a step is the time to read its weights and KV (counted) at the bandwidth that this
machine read memory with in the same round: it moves by a factor of two with what else the host does, and a
share of yesterday's best would say nothing about the engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

from cbviz.bench.peer import PeerError
from cbviz.config import EngineConfig
from cbviz.cost import calibrate
from cbviz.messages import Chunk, Sampling, SchedulerOutput
from cbviz.model.cpu_pass import PARTS
from cbviz.model.loader import LoadedModel
from cbviz.runners.torch_runner import TorchRunner

CONTEXT = 55
"""Tokens of each prompt."""
BATCHES = (1, 4, 8, 16)
STEPS = 12
_BLOCK = 16


class Theirs(Protocol):
    """Another engine: a name, and the seconds of each of `steps` decode calls behind these prompts."""

    name: str

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]: ...


@dataclass
class Case:
    """One batch size. Seconds by contender, all rounds; `step_s`: our whole steps; `shares`: floor over pass;
    `parts`: seconds of each part of one pass, medians.
    """

    batch: int
    pass_s: dict[str, list[list[float]]] = field(default_factory=dict)
    step_s: dict[str, list[float]] = field(default_factory=dict)
    shares: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    part_bytes: dict[str, dict[str, float]] = field(default_factory=dict)


def prompts(batch: int, vocab: int) -> list[list[int]]:
    return [
        [100 + (37 * (i + 7 * j)) % (min(vocab, 30_000) - 100) for i in range(CONTEXT)] for j in range(batch)
    ]


class Ours:
    """A runner in one precision, its passes timed from inside the step."""

    def __init__(self, model: LoadedModel, precision: str, most: int, steps: int) -> None:
        self.name = precision
        per = (CONTEXT + steps + _BLOCK) // _BLOCK
        self._per = per
        self._runner = TorchRunner(
            model, EngineConfig(precision=precision, num_blocks=most * per + 1, block_size=_BLOCK)
        )
        self._forward = self._runner._forward
        self._runner._forward = self._timed  # type: ignore[method-assign]
        self._pass_s = 0.0
        self.vocab = model.config.vocab_size

    def _timed(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        t0 = perf_counter()
        logits = self._forward(*args, **kwargs)
        self._pass_s = perf_counter() - t0
        return logits

    def decode(
        self, batch: int, steps: int
    ) -> tuple[list[float], list[float], dict[str, float], dict[str, list[float]]]:
        """Seconds of each pass and step, what was counted of the last, and seconds of each part where the
        pass tells them.

        Every fourth step has its parts timed and does not count.
        """
        r = self._runner
        r.reset()
        tokens = prompts(batch, self.vocab)
        tables = [[1 + j * self._per + k for k in range(self._per)] for j in range(batch)]
        greedy = Sampling(ignore_eos=True)
        whole: Any = r.decoder.whole if hasattr(r.decoder.whole, "marking") else None
        passes, whole_steps, parts = [], [], dict[str, list[float]]()
        counted: dict[str, float] = {}
        for n in range(steps + 1):
            plan = SchedulerOutput(n + 1)
            plan.chunks = [
                Chunk(f"r{j}", len(t) - 1 if n else 0, 1 if n else len(t), t, table, True, greedy)
                for j, (t, table) in enumerate(zip(tokens, tables))
            ]
            watched = whole is not None and n % 4 == 3
            if watched:
                whole.marking = True
            t0 = perf_counter()
            out = r.execute(plan)
            took = perf_counter() - t0
            if watched:
                whole.marking = False
                sums: dict[str, float] = {}
                last = 0.0
                for part, at in whole.marks:
                    sums[PARTS[part]] = sums.get(PARTS[part], 0.0) + at - last
                    last = at
                for name, s in sums.items():
                    parts.setdefault(name, []).append(s)
            elif n:
                passes.append(self._pass_s)
                whole_steps.append(took)
            assert out.counted is not None
            counted = out.counted
            for j, t in enumerate(tokens):
                t += out.token_ids[f"r{j}"]
        return passes, whole_steps, counted, parts

    def part_bytes(self) -> dict[str, float]:
        """Bytes of weights that each product reads in a step."""
        w = self._runner.decoder.weights

        def size(m: Any) -> float:
            return (
                float(m.q.numel() + 4 * m.scale.numel())
                if hasattr(m, "scale")
                else float(m.numel() * m.element_size())
            )

        names = {
            "QKV product": "qkv",
            "output product": "o",
            "gate and up product": "gate_up",
            "down product": "down",
        }
        return {part: sum(size(getattr(layer, n)) for layer in w.layers) for part, n in names.items()} | {
            "output head": size(w.head)
        }


def measure(
    model: LoadedModel,
    precisions: Sequence[str],
    theirs: Sequence[Theirs],
    rounds: int,
    tell: Callable[[str], None],
    lost: dict[str, str] | None = None,
    *,
    batches: Sequence[int] = BATCHES,
    steps: int = STEPS,
) -> list[Case]:
    """Everybody once a round, in turn, after a short round that does not count; each round begins with a
    reading of the memory bandwidth. `lost`: see `engine.measure`.
    """
    lost = {} if lost is None else lost
    ours = [Ours(model, p, max(batches), steps) for p in precisions]
    cases = []
    for batch in batches:
        case = Case(batch)
        seen: dict[str, dict[str, list[float]]] = {}
        for i in range(rounds + 1):
            tell(f"decode steps, batch {batch}" + (f", round {i}" if i else ", warming up"))
            bandwidth = calibrate.bandwidth_now() if i else 1.0
            for o in ours:
                gc.collect()
                passes, whole, counted, parts = o.decode(batch, steps if i else 2)
                if not i:
                    continue
                case.pass_s.setdefault(o.name, []).append(passes)
                case.step_s.setdefault(o.name, []).extend(whole)
                case.shares.setdefault(o.name, []).append(
                    (counted["weight_bytes"] + counted["kv_bytes"]) / bandwidth / median(passes)
                )
                for name, v in parts.items():
                    seen.setdefault(o.name, {}).setdefault(name, []).extend(v)
            for t in theirs:
                if t.name in lost:
                    continue
                try:
                    v = t.decode(prompts(batch, ours[0].vocab if ours else 30_000), steps if i else 2)
                except PeerError as e:
                    lost[t.name] = str(e)
                    case.pass_s.pop(t.name, None)
                    continue
                if i:
                    case.pass_s.setdefault(t.name, []).append(v)
        case.parts = {p: {name: median(v) for name, v in s.items()} for p, s in seen.items()}
        case.part_bytes = {o.name: o.part_bytes() for o in ours}
        cases.append(case)
    return cases


def ratio(case: Case, a: str, b: str) -> float:
    """Speed of a over that of b: the median over rounds of the ratio of the rounds' medians."""
    return median(median(y) / median(x) for x, y in zip(case.pass_s[a], case.pass_s[b], strict=True))


def data(cases: Sequence[Case], precisions: Sequence[str]) -> list[dict[str, Any]]:
    """Plain data."""
    return [
        {
            "batch": c.batch,
            "context": CONTEXT,
            "contenders": {
                n: {
                    "pass_s": [median(x) for x in v],
                    "median_s": median(median(x) for x in v),
                    "step_s": median(c.step_s[n]) if n in c.step_s else None,
                    "floor_share": median(c.shares[n]) if n in c.shares else None,
                    "parts_s": c.parts.get(n, {}),
                    "part_bytes": c.part_bytes.get(n, {}),
                }
                for n, v in c.pass_s.items()
            },
            "ratios": {p: {o: ratio(c, p, o) for o in c.pass_s if o not in precisions} for p in precisions},
        }
        for c in cases
    ]


def table(cases: list[dict[str, Any]], others: Sequence[str]) -> list[str]:
    """For people."""
    lines = [
        "",
        (
            f"decode steps: one token for each of some requests at {CONTEXT} tokens; the decode call alone, "
            "both sides without the choice of tokens; milliseconds, medians"
        ),
    ]
    names = list(cases[0]["contenders"])  # who is lost at a larger batch was there at the first
    wide = max(map(len, names)) + 2
    for c in cases:
        lines.append(
            f"{'batch ' + str(c['batch']):{wide}}{'ms':>9}{'whole step':>12}"
            + "".join(f"{'/ ' + o.split()[0]:>14}" for o in others)
            + f"{'of the floor':>14}"
        )
        for n, t in c["contenders"].items():
            step = f"{1e3 * t['step_s']:>12.2f}" if t["step_s"] is not None else " " * 12
            ratios = "".join(
                f"{c['ratios'][n][o]:>14.2f}" if o in c["ratios"].get(n, {}) else " " * 14 for o in others
            )
            share = f"{t['floor_share']:>13.0%}" if t["floor_share"] is not None else ""
            lines.append(f"{n:{wide}}{1e3 * t['median_s']:>9.2f}{step}{ratios} {share}".rstrip())
    return lines


def profile_lines(case: dict[str, Any], precision: str) -> list[str]:
    """Where the time of a pass goes: each part's milliseconds, share, and the speed at which a product reads
    its weights.
    """
    t = case["contenders"][precision]
    whole = sum(t["parts_s"].values()) or 1.0
    lines = [f"  {precision}, batch {case['batch']}: where the time of a pass goes (its own clock, medians):"]
    for part, s in sorted(t["parts_s"].items(), key=lambda x: -x[1]):
        read = f", reads {t['part_bytes'][part] / s / 1e9:.1f} GB/s" if part in t["part_bytes"] and s else ""
        lines.append(f"    {part:<22}{1e3 * s:>8.2f} ms {s / whole:>5.0%}{read}")
    return lines


__all__ = [
    "BATCHES",
    "CONTEXT",
    "Case",
    "Ours",
    "data",
    "measure",
    "profile_lines",
    "prompts",
    "ratio",
    "table",
]
