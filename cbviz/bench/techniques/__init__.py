"""What each decoding and KV technique gives and what it costs, measured here and now: `cbviz bench
techniques`.

Owns the frame: the row, what a technique is given (`Context`), the run over all of them, and the table. Knows
no technique. Each one is a module of this package, found by its name; nothing is listed anywhere:

    # cbviz/bench/techniques/swap.py            -> cbviz bench techniques --only swap
    "Swap to host memory."                      the docstring's first line is the technique's title
    def measure(ctx: Context) -> Iterator[Row]:
        ask = ctx.article(share=0.2)                                             # requests; or a list of RequestSpec of your own
        plain, swapped = ctx.session(ask, num_blocks=64), ctx.session(ask, num_blocks=64, preemption_mode="swap")   # on weights that all share
        won = ctx.contest({"recompute": plain, "swap": swapped})                 # in turn, in rounds: medians, and ratios of the same round
        yield Row("64 blocks", "swap against recompute", benefit=measured(won.ratio("recompute", "swap"), "x
        as fast"),
                  cost=counted(bytes_moved / 1e6, "MB moved"), check=same_tokens(plain, swapped), note="...")

A row says what was compared with what, one benefit, one cost, and whether what must be equal was equal. A
figure says what it is: `measured` on this machine in this run, `counted` (from shapes, or by the engine,
exact), or `modelled`. A benefit may be a loss, and then the row says so: a ratio of 0.8 x stays 0.8 x. With
`ctx.quick` a technique does the least that still shows its point (for tests: seconds). torch and sessions are
imported inside functions, so that the list of names costs nothing. A technique that raises loses its own rest
of rows, not the others.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import shutil
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from cbviz.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from cbviz.messages import RequestSpec
    from cbviz.model.loader import LoadedModel
    from cbviz.session import Session

Kind = Literal["measured", "counted", "modelled"]
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Figure:
    """`1.84 x as fast (measured)`. `unit` is written behind the value as it stands."""

    value: float
    unit: str
    kind: Kind

    def __str__(self) -> str:
        v = self.value
        text = f"{v:,.0f}" if v == int(v) and abs(v) < 1e15 else f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.3g}"
        return f"{text} {self.unit} ({self.kind})"


def measured(value: float, unit: str) -> Figure:
    return Figure(float(value), unit, "measured")


def counted(value: float, unit: str) -> Figure:
    return Figure(float(value), unit, "counted")


def modelled(value: float, unit: str) -> Figure:
    return Figure(float(value), unit, "modelled")


@dataclass(frozen=True)
class Check:
    """Whether what must hold held.

    `text` tells the outcome in figures: `2,160 of 2,160 tokens equal`, `chi-square 11.2 at 9 degrees of
    freedom, p = 0.26`.
    """

    text: str
    holds: bool


def same_tokens(a: Session, b: Session) -> Check:
    """Both finished runs said the same, token for token: counts equal tokens at equal places over all
    requests of `a`.
    """
    mine, theirs = ({i: s.request(i).output_token_ids for i in s.request_ids} for s in (a, b))
    total = max(sum(map(len, mine.values())), sum(map(len, theirs.values())))
    equal = sum(x == y for i, ids in mine.items() for x, y in zip(ids, theirs.get(i, [])))
    return Check(f"{equal:,} of {total:,} tokens equal", equal == total and mine.keys() == theirs.keys())


@dataclass(frozen=True)
class Row:
    """One comparison. `technique` is filled in by the frame."""

    setting: str
    """Under what: `alone`, `full batch of 16, k = 4`, `int8, 512 tokens`."""
    versus: str
    """What is compared with what: `3 drafts a step against none`."""
    benefit: Figure | None
    cost: Figure | None
    check: Check
    note: str = ""
    technique: str = ""


@dataclass(frozen=True)
class Contest:
    """What `Context.contest` found: seconds of each contender, one figure a round, and what it returned last."""

    seconds: dict[str, list[float]]
    results: dict[str, Any] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Seconds."""
        return median(self.seconds[name])

    def ratio(self, a: str, b: str) -> float:
        """Seconds of a over those of b, median over the ratios of one round each: above 1, b is the quicker."""
        return median(x / y for x, y in zip(self.seconds[a], self.seconds[b], strict=True))


class Context:
    """What a technique is given.

    `quick`: do the least that still shows the point. The model is loaded when first asked for, once for all.
    """

    def __init__(
        self,
        model: str | LoadedModel = "smollm2",
        seed: int = 0,
        quick: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._model = model
        self.seed = seed
        self.quick = quick
        self.tell: Callable[[str], None] = progress or (lambda note: None)
        """Says what is being done, in a few words."""

    @cached_property
    def model(self) -> LoadedModel:
        """The weights, read once; every session here shares them."""
        from cbviz.model import threads
        from cbviz.model.loader import LoadedModel, load

        threads.use_available_cpus()
        return self._model if isinstance(self._model, LoadedModel) else load(self._model)

    def article(self, share: float | None = None, num_requests: int | None = None) -> list[RequestSpec]:
        """The article's requests, all there at the start, ends of sequence ignored; every output cut to
        `share`. Left out: 0.3 of all 20, quick: 0.05 of 6.
        """
        from cbviz.bench.engine import article
        from cbviz.messages import RequestSpec, Sampling

        share, n = share or (0.05 if self.quick else 0.3), num_requests or (6 if self.quick else 20)
        asked = article(share, self.model.config.vocab_size, n)
        return [
            RequestSpec(f"r{i}", tuple(ids), out, arrival_step=0, sampling=Sampling(ignore_eos=True))
            for i, (ids, out) in enumerate(asked)
        ]

    def ids(self, num: int, turn: int = 7) -> list[int]:
        """`num` token ids that mean nothing, of the model's vocabulary; `turn`: from one to the next."""
        return [(turn * i) % (self.model.config.vocab_size - 5) + 5 for i in range(num)]

    def text(
        self, words: str, max_tokens: int, request_id: str = "a", *, chat: bool = False, **spec: Any
    ) -> RequestSpec:
        """A request for this text. Raises ConfigError for a model without a tokenizer."""
        from cbviz.messages import RequestSpec, Sampling

        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{self.model.title} has no tokenizer: this technique is shown on words")
        ids = tokenizer.chat(words) if chat else tokenizer.encode(words)
        return RequestSpec(
            request_id,
            tuple(ids),
            max_tokens,
            **{"arrival_step": 0, "sampling": Sampling(ignore_eos=True), **spec},
        )

    def session(
        self, workload: Sequence[RequestSpec] | None, model: LoadedModel | None = None, **fields: Any
    ) -> Session:
        """A session under the measured clock on the shared weights (or on `model`), not yet run.

        `fields`: of EngineConfig.
        """
        from cbviz.runners.torch_runner import TorchRunner
        from cbviz.session import Session

        fields = {"seed": self.seed, "clock": "measured", **fields}
        return Session(workload, runner=TorchRunner(model or self.model, EngineConfig(**fields)), **fields)

    def contest(
        self, contenders: Mapping[str, Session | Callable[[], Any]], rounds: int | None = None
    ) -> Contest:
        """Each contender once a round, in turn; a round before them warms up and does not count.

        A session runs from its start to its end; a function is called. Timed by wall clock. Rounds left out:
        3, quick: 1 and no warm-up.
        """
        from cbviz.session import Session

        seconds: dict[str, list[float]] = {n: [] for n in contenders}
        results: dict[str, Any] = {}
        for i in range(1 if self.quick else 0, (rounds or (1 if self.quick else 3)) + 1):
            for name, what in contenders.items():
                self.tell(f"{name}, {f'round {i}' if i else 'warming up'}")
                if isinstance(what, Session):
                    what.reset()
                gc.collect()
                t0 = perf_counter()
                results[name] = what.run() if isinstance(what, Session) else what()
                spent = perf_counter() - t0
                if i:
                    seconds[name].append(spent)
        return Contest(seconds, results)


def names() -> list[str]:
    """The techniques there are. Loads none of them."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def pick(wanted: Sequence[str]) -> list[str]:
    """`wanted`, checked, or all if it is empty. Raises ConfigError naming one that does not exist."""
    there = names()
    if strange := next((n for n in wanted if n not in there), None):
        raise ConfigError(f"technique is {strange!r}, it must be one of {', '.join(there)}")
    return list(dict.fromkeys(wanted)) or there


def _load(name: str) -> tuple[str, Callable[[Context], Iterator[Row]]]:
    module = importlib.import_module(f"{__name__}.{name}")
    return (module.__doc__ or name).strip().splitlines()[0].rstrip("."), module.measure


def run(
    only: Sequence[str] = (),
    *,
    model: str | LoadedModel = "smollm2",
    seed: int = 0,
    quick: bool = False,
    progress: Tell | None = None,
) -> dict[str, Any]:
    """Everything as plain data: `rows`, `titles` a technique, and `failed`: what a technique raised, with the
    place. Raises ConfigError for an unknown name.
    """
    from cbviz.model import ops, threads

    chosen = pick(only)
    tell = progress or (lambda done, total, note: None)
    at = 0
    ctx = Context(model, seed, quick, lambda note: tell(at, len(chosen), f"{chosen[at]}: {note}"))
    title = ctx.model.title
    rows: list[Row] = []
    titles: dict[str, str] = {}
    failed: list[dict[str, str]] = []
    for at, name in enumerate(chosen):  # `progress` above reads `at`
        tell(at, len(chosen), name)
        try:
            titles[name], measure = _load(name)
            for row in measure(ctx):
                rows.append(replace(row, technique=name))
        except Exception as e:
            last = traceback.extract_tb(e.__traceback__)[-1]
            failed.append(
                {
                    "technique": name,
                    "error": f"{type(e).__name__}: {' '.join(str(e).split())}",
                    "where": f"{Path(last.filename).name}:{last.lineno}",
                }
            )
        gc.collect()
    tell(len(chosen), len(chosen), "")
    return {
        "model": title,
        "threads": threads.use_available_cpus(),
        "kernels": ops.pick("auto", "cpu").about,
        "seed": seed,
        "quick": quick,
        "titles": titles,
        "rows": [asdict(r) for r in rows],
        "failed": failed,
        "holds": not failed and all(r.check.holds for r in rows),
    }


_COLUMNS = (("setting", 20), ("compared", 26), ("benefit", 22), ("cost", 22), ("check", 26))
"""Least widths; what the terminal has beyond them is shared out."""


def table(result: dict[str, Any], width: int | None = None) -> str:
    """The result for people, in `width` columns (left out: as wide as the terminal, 100 to 180)."""
    width = max(100, min(180, width or shutil.get_terminal_size((140, 0)).columns))
    more, gap = width - sum(w for _, w in _COLUMNS) - 2 * (len(_COLUMNS) - 1), "  "
    wide = [w + max(0, more) // len(_COLUMNS) for _, w in _COLUMNS]
    if more < 0:
        wide = [w + more // len(_COLUMNS) for w in wide]

    def line(cells: Sequence[str]) -> list[str]:
        parts = [textwrap.wrap(c, w, break_long_words=True) or [""] for c, w in zip(cells, wide, strict=True)]
        return [
            gap.join((p[i] if i < len(p) else "").ljust(w) for p, w in zip(parts, wide, strict=True)).rstrip()
            for i in range(max(map(len, parts)))
        ]

    def figure(f: dict[str, Any] | None) -> str:
        return str(Figure(**f)) if f is not None else "none"

    about = (
        f"{result['model']}, {result['threads']} threads, {result['kernels']}"
        + (", quick: the figures are rough" if result["quick"] else ""),
        (
            "Ratios are medians over rounds in turn, here and now. measured: timed in this run; counted: "
            "exact, from shapes or by the engine; modelled: by a formula."
        ),
    )
    out = [
        *(part for text in about for part in textwrap.wrap(text, width)),
        "",
        *line([c for c, _ in _COLUMNS]),
        gap.join("-" * w for w in wide),
    ]
    broken = {f["technique"]: f for f in result["failed"]}
    for name in dict.fromkeys([*result["titles"], *broken]):
        out += ["", f"{name}: {result['titles'].get(name, name)}"]
        for r in (r for r in result["rows"] if r["technique"] == name):
            held = r["check"]["text"] if r["check"]["holds"] else f"DOES NOT HOLD: {r['check']['text']}"
            out += line([r["setting"], r["versus"], figure(r["benefit"]), figure(r["cost"]), held])
            if r["note"]:
                out += textwrap.wrap(r["note"], width - 4, initial_indent="    ", subsequent_indent="    ")
        if name in broken:
            out += textwrap.wrap(
                f"FAILED at {broken[name]['where']}: {broken[name]['error']}",
                width - 4,
                initial_indent="    ",
                subsequent_indent="    ",
            )
    return "\n".join(out)


__all__ = [
    "Check",
    "Contest",
    "Context",
    "Figure",
    "Row",
    "counted",
    "measured",
    "modelled",
    "names",
    "pick",
    "run",
    "same_tokens",
    "table",
]
