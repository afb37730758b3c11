"""Everything that is to be known about a GPU, in one go: operators, equal tokens, waits, speed against others
and against the roof. Writes one JSON file as it goes.

Run by `kernels/device_check.py`. Each part runs in a process of its own with a time limit, so that one that
fails, hangs or breaks the device loses only itself; what a part had found until then is kept. On a CPU
(`--device cpu`) the same code runs small, on a stand-in for the card: that tries the script, its figures mean
nothing.

    environment  versions, card, what the engine would choose           peaks   bandwidth and arithmetic, measured
    ops          every operator against float64, each set of operators  tokens  greedy tokens of a model under several disciplines, graphs on and off
    waits        a step under a guard that raises where the host waits   steps   a decode step by batch size, graphs and eager, beside its floor
    bench        the article's requests and one alone: ours, transformers' `generate`, its continuous batching
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import cbviz.model  # noqa: F401  before torch: it settles how torch's threads wait

# isort: split
import torch

from cbviz.bench import engine, op_suite
from cbviz.config import EngineConfig
from cbviz.messages import RequestSpec, Sampling
from cbviz.model import device_peaks, hub, ops
from cbviz.model.decoder import DecoderConfig, LayerWeights, Weights
from cbviz.model.graphs import InOrder
from cbviz.model.loader import LoadedModel, load
from cbviz.model.sampling import Draw
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from cbviz.trace.metrics import metrics

TOTAL_S = 350.0
TIE = 0.001
"""Nats: where the two best are closer, a correct float32 engine may choose the other."""
BLOCK_SIZE = 16
PRECISIONS = ("exact", "fast")
DISCIPLINES: dict[str, dict[str, Any]] = {
    "vllm": {"max_num_batched_tokens": 64},
    "paged": {},
    "chunked": {"max_num_batched_tokens": 32},
    "static-padded": {"max_num_seqs": 4},
}


class Check:
    """What a part is given: how large to be, how long it has, and where its findings go.

    `small`: a try of the script itself.
    """

    def __init__(self, device: str, model: str, small: bool, budget_s: float, out: Path | None) -> None:
        self.device = device
        self.model_name = model
        self.small = small
        self._end_s = time.monotonic() + budget_s
        self._out = out
        self.found: dict[str, Any] = {}
        self._model: LoadedModel | None = None

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    @property
    def kernels(self) -> list[str]:
        """The sets of operators that there are here, best first."""
        best = ops.pick("auto", self.device).name
        return ["triton", "torch"] if best == "triton" else ["torch"]

    @property
    def model(self) -> LoadedModel:
        if self._model is None:
            self._model = (
                load(self.model_name) if self.model_name not in MADE_UP else made_up(self.model_name)
            )
        return self._model

    def note(self, **found: Any) -> None:
        """Findings of this part; they are on the disk when this returns."""
        self.found.update(found)
        if self._out is not None:
            _write(self._out, self.found)

    def row(self, name: str, row: dict[str, Any]) -> None:
        self.found.setdefault(name, []).append(row)
        self.note()

    def runner(
        self,
        kernels: str = "auto",
        precision: str = "exact",
        eager: bool = False,
        num_blocks: int = 64,
        seats: int = 8,
    ) -> TorchRunner:
        config = EngineConfig(
            device=self.device,
            kernels="torch" if self.device == "cpu" and kernels == "auto" else kernels,
            precision=precision,
            enforce_eager=eager,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=seats,
        )
        return TorchRunner(self.model, config, backend=InOrder() if self.device == "cpu" else None)


MADE_UP = {"toy": (2, 64, 4, 2, 16, 96, 211), "random-135m": (30, 576, 9, 3, 64, 1536, 49152)}
"""Models of random weights: layers, hidden size, heads, key heads, head size, MLP size, vocabulary.

`random-135m` has SmolLM2-135M's shape, and so its speed.
"""


def made_up(name: str) -> LoadedModel:
    """A Llama of random weights; the same numbers each time."""
    layers, hidden, heads, kv_heads, dim, inner, vocab = MADE_UP[name]
    c = DecoderConfig(
        architecture="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=inner,
        vocab_size=vocab,
        max_context=2048,
        rms_norm_eps=1e-5,
        windows=(0,) * layers,
    )
    g = torch.Generator().manual_seed(0)

    def w(*shape: int) -> torch.Tensor:
        return (
            torch.randn(*shape, generator=g) * shape[-1] ** -0.5
            if len(shape) == 2
            else torch.rand(*shape, generator=g) + 0.5
        )

    made = [
        LayerWeights(
            w(hidden),
            w(c.q_size + 2 * c.kv_size, hidden),
            w(hidden, c.q_size),
            w(hidden),
            w(2 * inner, hidden),
            w(hidden, inner),
        )
        for _ in range(layers)
    ]
    embed = w(vocab, hidden)
    return LoadedModel(
        name,
        f"random weights, {name}",
        c,
        Weights(embed, made, w(hidden), embed, c.inverse_frequencies()),
        None,
        (),
    )


# parts ------------------------------------------------------------------------------------------------------


def environment(check: Check) -> None:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    check.note(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cores=os.cpu_count(),
        versions={p: version(p) for p in ("torch", "triton", "transformers", "numpy")},
        device=check.device,
        small=check.small,
    )
    if check.device == "cuda":
        p = torch.cuda.get_device_properties(0)
        check.note(
            card=p.name,
            capability=f"{p.major}.{p.minor}",
            memory_bytes=p.total_memory,
            multiprocessors=p.multi_processor_count,
            cuda=torch.version.cuda,
        )
    check.note(model=check.model.title)
    runner = check.runner()
    assert runner.device_pass is not None
    check.note(
        operators=runner.ops.about,
        decode_steps=runner.device_pass.about,
        report=getattr(runner.ops, "report", {}),
    )


def peaks(check: Check) -> None:
    sizes: dict[str, Any] = {"num_bytes": 1 << 22, "side": 256} if check.small else {}
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        d = device_peaks.measure(torch.device(check.device), kind, **sizes)
        check.row(
            "rows",
            {
                "dtype": str(kind).removeprefix("torch."),
                "bandwidth_bytes_s": d.bandwidth_bytes_s,
                "flops_s": d.flops_s,
                "source": d.source,
            },
        )
    check.note(bandwidth_bytes_s=max(r["bandwidth_bytes_s"] for r in check.found["rows"]))


def operators(check: Check) -> None:
    kinds = (torch.float16, torch.float32, torch.bfloat16)
    for kernels in check.kernels:
        for shape in op_suite.SHAPES[:2] if check.small else op_suite.SHAPES:
            for kind in kinds[:1] if check.small else kinds:
                if check.left_s < 3:
                    check.row("skipped", {"kernels": kernels, "dtype": str(kind), "shape": list(shape)})
                    continue
                for row in op_suite.run(kernels, check.device, (kind,), (shape,)):
                    check.row("rows", row)
    rows = check.found["rows"]
    check.note(ok=all(r["ok"] for r in rows), num=len(rows), failed=[r for r in rows if not r["ok"]])


def _requests(check: Check) -> tuple[list[dict[str, Any]], str]:
    """Prompts with the tokens that must come and the lead of each, and where these are from."""
    folder = os.environ.get("CBVIZ_CONFORMANCE")
    path = Path(folder or "") / "smollm2-greedy.json"
    if folder and path.is_file() and check.model_name == "smollm2":
        asked, most = json.loads(path.read_text("utf-8"))["requests"], 6 if check.small else None
        return [
            {
                "prompt": q["prompt_token_ids"],
                "output": q["output_token_ids"][:most],
                "gaps": q["gap_to_second"][:most],
            }
            for q in asked[:most]
        ], "recorded with transformers, float32, CPU"
    vocab, g = check.model.config.vocab_size, torch.Generator().manual_seed(1)
    shared = torch.randint(vocab, (20,), generator=g).tolist()
    prompts = [
        shared * (i % 2) + torch.randint(vocab, (5 + 7 * i,), generator=g).tolist()
        for i in range(4 if check.small else 12)
    ]
    specs = [
        RequestSpec(
            f"q{i}", tuple(p), 6 if check.small else 32, arrival_step=0, sampling=Sampling(ignore_eos=True)
        )
        for i, p in enumerate(prompts)
    ]
    s = Session(
        specs,
        runner=TorchRunner(
            check.model, EngineConfig(device="cpu", precision="exact", num_blocks=256, block_size=BLOCK_SIZE)
        ),
        precision="exact",
        clock="modelled",
        num_blocks=256,
        block_size=BLOCK_SIZE,
    )
    s.run()
    gaps: dict[str, list[float]] = {x.request_id: [] for x in specs}
    for r in s.trace:
        for i, values in (r.gaps or {}).items():
            gaps[i] += values
    return [
        {"prompt": p, "output": s.request(f"q{i}").output_token_ids, "gaps": gaps[f"q{i}"]}
        for i, p in enumerate(prompts)
    ], "this engine on the CPU, float32"


def _agree(got: Sequence[int], request: dict[str, Any]) -> tuple[bool, int]:
    """Whether the tokens are the wanted ones up to the first tie, and how many are."""
    for i, (a, b, gap) in enumerate(zip(got, request["output"], request["gaps"], strict=False)):
        if a != b:
            return gap < TIE, i
    return len(got) == len(request["output"]), len(got)


def tokens(check: Check) -> None:
    requests, source = _requests(check)
    check.note(wanted_from=source, num_requests=len(requests))
    fields: dict[str, Any] = {
        "num_blocks": 12 if check.small and check.model_name == "smollm2" else 8 if check.small else 48,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
    }
    for precision in PRECISIONS:
        for kernels in check.kernels:
            for eager in (False, True):
                runner = check.runner(kernels, precision, eager, num_blocks=fields["num_blocks"])
                for discipline, more in list(DISCIPLINES.items())[
                    : 2 if check.small or precision == "fast" else None
                ]:
                    if check.left_s < 5:
                        return check.note(stopped="out of time")
                    runner.reset()
                    specs = [
                        RequestSpec(
                            f"q{i}",
                            tuple(q["prompt"]),
                            len(q["output"]),
                            arrival_step=1 + i // 3,
                            sampling=Sampling(ignore_eos=True),
                        )
                        for i, q in enumerate(requests)
                    ]
                    s = Session(
                        specs,
                        runner=runner,
                        precision=precision,
                        clock="modelled",
                        discipline=discipline,
                        device=check.device,
                        **(fields | more),
                    )
                    s.run()
                    found = [_agree(s.request(f"q{i}").output_token_ids, q) for i, q in enumerate(requests)]
                    assert runner.device_pass is not None
                    check.row(
                        "rows",
                        {
                            "precision": precision,
                            "kernels": runner.ops.name,
                            "eager": eager,
                            "discipline": discipline,
                            "equal": sum(ok for ok, _ in found),
                            "of": len(found),
                            "tokens_equal": sum(n for _, n in found),
                            "tokens": sum(len(q["output"]) for q in requests),
                            "preemptions": metrics(s.trace)["num_preemptions"],
                            "about": runner.device_pass.about,
                            "passes": dataclasses.asdict(runner.device_pass.counts),
                        },
                    )
    rows = [r for r in check.found["rows"] if r["precision"] == "exact"]
    check.note(ok=bool(rows) and all(r["equal"] == r["of"] for r in rows))


def waits(check: Check) -> None:
    """Steps after the first of their kind, under torch's guard: anything that waits for the card, but the one
    wait for the results, raises.
    """
    runner = check.runner(precision="fast")
    asked = [
        RequestSpec(
            f"r{i}",
            tuple(range(1, 40)),
            12,
            arrival_step=1 + 2 * i,
            sampling=Sampling(temperature=0.5 * (i % 2), ignore_eos=True),
        )
        for i in range(4)
    ]
    for guarded in (False, True):
        runner.reset()
        with _guard(check.device) if guarded else _nothing():
            s = Session(
                asked,
                runner=runner,
                precision="fast",
                clock="measured",
                device=check.device,
                num_blocks=64,
                block_size=BLOCK_SIZE,
                enable_prefix_caching=False,
            )
            s.run()
    assert runner.device_pass is not None
    check.note(
        ok=True,
        guard="torch.cuda.set_sync_debug_mode('error')" if check.device == "cuda" else "none: no card",
        passes=dataclasses.asdict(runner.device_pass.counts),
    )


@contextmanager
def _guard(device: str) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def steps(check: Check) -> None:
    """Decode steps of equal sequences, packed, run and sampled as in a real step, without the scheduler: wall
    and device time, medians.
    """
    sizes: dict[str, Any] = {"num_bytes": 1 << 22, "side": 64} if check.small else {"side": 1024}
    bandwidth = device_peaks.measure(torch.device(check.device), **sizes).bandwidth_bytes_s
    rows, contexts, turns = ((1, 3), (20,), 3) if check.small else ((1, 8, 64, 256), (256, 1024), 20)
    for precision in PRECISIONS:
        for kernels in check.kernels:
            blocks = -(-(contexts[-1] + 2) // BLOCK_SIZE)
            for eager in (False, True):
                runner = check.runner(
                    kernels, precision, eager, num_blocks=rows[-1] * blocks + 1, seats=rows[-1]
                )
                there = runner.device_pass
                assert there is not None
                for n in rows:
                    for context in contexts:
                        if check.left_s < 4:
                            return check.note(stopped="out of time")
                        parts = [
                            ([7], context, list(range(1 + i * blocks, 1 + (i + 1) * blocks)))
                            for i in range(n)
                        ]
                        draws = [Draw(Sampling(), 0, f"r{i}", context + 1) for i in range(n)]
                        walls, busy = [], []
                        for turn in range(turns + 3):
                            t0 = time.perf_counter()
                            there.start()
                            there.sample(there.forward(parts, runner.kv, 0, range(n)), draws)
                            if turn > 2:
                                walls.append(time.perf_counter() - t0)
                                busy.append(there.busy_s or 0.0)
                        d, c = runner.decoder, check.model.config
                        moved = (
                            d.layer_bytes
                            + d.head_bytes
                            + n * (context + 2) * runner.kv.bytes_per_token
                            + n * d.embed_row_bytes
                        )
                        check.row(
                            "rows",
                            {
                                "precision": precision,
                                "kernels": runner.ops.name,
                                "eager": eager,
                                "rows": n,
                                "context": context,
                                "step_s": median(walls),
                                "busy_s": median(busy),
                                "floor_s": moved / bandwidth,
                                "floor_share": moved / bandwidth / median(walls),
                                "tokens_per_s": n / median(walls),
                                "layers": c.num_layers,
                                "about": there.about,
                            },
                        )
                del runner, there
                _free(check.device)
    check.note(bandwidth_bytes_s=bandwidth)


class Ours:
    """A session on the device, recorder and reasons included."""

    def __init__(self, check: Check, kernels: str, precision: str, eager: bool, seats: int) -> None:
        self.name = f"ours, {precision}, {kernels}, {'eager' if eager else 'graphs'}"
        self._seats = seats
        self._blocks = 256 if check.small else 4096
        self._fields: dict[str, Any] = {
            "precision": precision,
            "num_blocks": self._blocks,
            "block_size": BLOCK_SIZE,
            "device": check.device,
            "enforce_eager": eager,
        }
        self._runner = check.runner(kernels, precision, eager, self._blocks, seats)
        self.about: dict[str, Any] = {}

    def run(self, requests: engine.Requests, seats: int) -> tuple[float, int]:
        self._runner.reset()
        specs = [
            RequestSpec(f"r{i}", tuple(ids), n, arrival_step=0, sampling=Sampling(ignore_eos=True))
            for i, (ids, n) in enumerate(requests)
        ]
        t0 = time.perf_counter()
        s = Session(
            specs,
            runner=self._runner,
            clock="measured",
            max_num_seqs=seats,
            enable_prefix_caching=False,
            **self._fields,
        )
        s.run()
        seconds = time.perf_counter() - t0
        decodes = [
            r for r in s.trace if r.measured_s and r.chunks and all(c.num_tokens == 1 for c in r.chunks)
        ]
        timed = [r for r in decodes if r.device]
        assert self._runner.device_pass is not None
        self.about = {
            "decode_step_s": median(r.measured_s for r in decodes if r.measured_s) if decodes else None,
            "busy_share": median(
                r.device["busy_s"] / r.measured_s for r in timed if r.device and r.measured_s
            )
            if timed
            else None,
            "moved_bytes": median(
                r.counted["weight_bytes"] + r.counted["kv_bytes"] for r in decodes if r.counted
            )
            if decodes
            else None,
            "model_share": sum(r.measured_s or 0.0 for r in s.trace) / seconds,
            "decode_steps": self._runner.device_pass.about,
        }
        return seconds, sum(len(s.request(i).output_token_ids) for i in s.request_ids)


class Generate(engine.Transformers):
    """transformers' `generate`, with its type of number in the name."""

    def __init__(self, folder: Path, device: str, kind: torch.dtype) -> None:
        super().__init__(folder, device, kind)
        self.name += f" generate, {str(kind).removeprefix('torch.')}"
        self.about: dict[str, Any] = {}


class Continuous:
    """transformers' own continuous batching, on the model of `Generate`. Its warm-up is not timed."""

    def __init__(self, generate: Generate, limit_s: float) -> None:
        self.name = generate.name.replace("generate", "continuous batching")
        self._model = generate.model
        self._device = generate.device
        self._limit_s = limit_s
        self.about: dict[str, Any] = {}

    def run(self, requests: engine.Requests, seats: int) -> tuple[float, int]:
        from transformers import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=max(n for _, n in requests),
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            bos_token_id=1,
        )
        more: dict[str, Any] = {}
        try:
            from transformers.generation.configuration_utils import ContinuousBatchingConfig

            # By default it takes nearly all memory, on which others in this process live too.
            room = (
                {"num_blocks": 16, "page_size": 32, "max_batch_tokens": 64}
                if self._device == "cpu"
                else {"max_memory_percent": 0.4}
            )
            more["continuous_batching_config"] = ContinuousBatchingConfig(
                max_requests_per_batch=seats, **room
            )
            self.about["seats"] = seats
        except (ImportError, TypeError):
            self.about["seats"] = "its own choice"
        with self._model.continuous_batching_context_manager(generation_config=config, **more) as manager:
            t0, produced, done = time.perf_counter(), 0, 0
            for i, (ids, n) in enumerate(requests):
                manager.add_request(ids, request_id=f"r{i}", max_new_tokens=n)
            while done < len(requests):
                if time.perf_counter() - t0 > self._limit_s:
                    raise TimeoutError(f"{done} of {len(requests)} requests after {self._limit_s:.0f} s")
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if getattr(result, "error", None):
                        raise RuntimeError(str(result.error))
                    done, produced = done + 1, produced + len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("its thread ended")
            seconds = time.perf_counter() - t0
        return seconds, produced


def bench(check: Check) -> None:
    """Output tokens a second, everybody in turn; a contender that raises, or for which there is no time left,
    says so.
    """
    vocab = check.model.config.vocab_size
    share = 0.05 if check.small else 1.0
    alone: engine.Requests = [
        (
            [100 + 37 * i % (vocab - 100) for i in range(engine.ALONE[0])],
            max(1, round(engine.ALONE[1] * share)),
        )
    ]
    loads = [
        ("article", engine.article(share, vocab, 4 if check.small else 20), 2 if check.small else 8),
        ("alone", alone, 1),
    ]
    if not check.small:
        loads.insert(1, ("article, 64 seats", engine.article(share, vocab, 128), 64))
    best = check.kernels[0]
    makers: list[Callable[[], Any]] = [
        lambda p=p, k=k, e=e: Ours(check, k, p, e, max(n for _, _, n in loads))  # type: ignore[misc]
        for p in ("fast", "exact")
        for k, e in (
            [(best, False), (best, True)] + ([("torch", False)] if best != "torch" and p == "fast" else [])
        )
    ]
    with tempfile.TemporaryDirectory(prefix="cbviz-check-") as name:
        folder = Path(name)
        engine.export(check.model, folder)
        makers += [lambda: Generate(folder, check.device, torch.float32 if check.small else torch.float16)]
        contenders: list[Any] = []
        for make in makers:
            try:
                contenders.append(make())
                if isinstance(contenders[-1], Generate):
                    contenders.append(Continuous(contenders[-1], 5 if check.small else 25))
            except Exception as e:
                check.row("absent", {"raised": f"{type(e).__name__}: {str(e)[:300]}"})
        for load_name, requests, seats in loads:
            wanted = sum(n for _, n in requests)
            took: dict[str, list[float]] = {}
            notes: dict[str, str] = {}
            for turn in range(1 if check.small else 3):
                for c in contenders:
                    if c.name in notes or (
                        turn and isinstance(c, (Generate, Continuous)) and max(took[c.name]) > 5
                    ):
                        continue  # slow ones once: their spread matters less than the time
                    if check.left_s < 1.5 * max(took.get(c.name, [3.0])):
                        notes[c.name] = "out of time"
                        continue
                    try:
                        if not turn:  # a first run captures, compiles and fills caches, and does not count
                            c.run(
                                [(ids, 2) for ids, _ in requests[:seats]]
                                if not isinstance(c, Ours)
                                else requests,
                                seats,
                            )
                        if check.device == "cuda":
                            torch.cuda.reset_peak_memory_stats()
                        seconds, produced = c.run(requests, seats)
                        if produced != wanted:
                            raise RuntimeError(f"made {produced} tokens, {wanted} were asked for")
                        took.setdefault(c.name, []).append(seconds)
                        if check.device == "cuda":
                            c.about["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
                    except Exception as e:
                        notes[c.name] = f"{type(e).__name__}: {str(e)[:300]}"
            for c in contenders:
                runs = took.get(c.name, [])
                check.row(
                    "rows",
                    {
                        "load": load_name,
                        "seats": seats,
                        "requests": len(requests),
                        "output_tokens": wanted,
                        "contender": c.name,
                        "tokens_per_s": [wanted / s for s in runs],
                        "median": median(wanted / s for s in runs) if runs else None,
                        "note": notes.get(c.name, ""),
                        **c.about,
                    },
                )


PARTS: dict[str, tuple[Callable[[Check], None], float]] = {
    "environment": (environment, 45),
    "peaks": (peaks, 30),
    "ops": (operators, 110),
    "tokens": (tokens, 80),
    "waits": (waits, 30),
    "steps": (steps, 60),
    "bench": (bench, 150),
}
"""Each part and the most seconds it gets; a part that ends early leaves its time to those behind it."""


# the script -------------------------------------------------------------------------------------------------


def run_part(name: str, check: Check) -> dict[str, Any]:
    """A part's findings; what it raised stands in them."""
    t0 = time.monotonic()
    try:
        PARTS[name][0](check)
    except Exception as e:
        check.note(raised=f"{type(e).__name__}: {str(e)[:1000]}")
    check.note(seconds=round(time.monotonic() - t0, 2))
    return check.found


def run(
    out: Path,
    *,
    device: str,
    model: str,
    parts: Sequence[str],
    small: bool,
    total_s: float = TOTAL_S,
    isolate: bool = True,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All parts, each in a process of its own where `isolate` is on.

    `out` holds what is known so far after each.
    """
    end = time.monotonic() + total_s
    result: dict[str, Any] = {"format": 1, "parts": {}}
    for name in parts:
        left = end - time.monotonic()
        budget = min(PARTS[name][1], left)
        if budget < (0 if small else 8):
            result["parts"][name] = {"raised": "not begun: out of time"}
        elif isolate:
            result["parts"][name] = _apart(name, device, model, small, budget)
        else:
            result["parts"][name] = run_part(name, Check(device, model, small, budget, None))
        part = result["parts"][name]
        tell(
            f"{name:<12} {part.get('seconds', '-')!s:>7} s  "
            f"{part['raised'] if 'raised' in part else 'failed' if part.get('ok') is False else 'done'}"
        )
        _write(out, result)
        _free(device)
    return result


def _apart(name: str, device: str, model: str, small: bool, budget_s: float) -> dict[str, Any]:
    """The part in its own process; one that outlasts its budget by a grace is ended, and what it had written
    is kept.
    """
    with tempfile.TemporaryDirectory(prefix="cbviz-check-") as folder:
        path = Path(folder) / "part.json"
        command = [
            sys.executable,
            "-m",
            "cbviz.bench.device_check",
            "--part",
            name,
            "--out",
            str(path),
            "--device",
            device,
            "--model",
            model,
            "--budget",
            str(budget_s),
            *(["--small"] if small else []),
        ]
        root = str(Path(__file__).resolve().parents[2])
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        said = ""
        try:
            done = subprocess.run(
                command,
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=budget_s + 10,
                text=True,
                errors="replace",
            )
            if done.returncode:
                said = f"ended with {done.returncode}: {done.stderr.strip()[-600:]}"
        except subprocess.TimeoutExpired:
            said = f"did not end within {budget_s + 10:.0f} s"
        try:
            found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            found = {}
        if said:
            found["raised"] = said
        return found


def _write(path: Path, data: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1), "utf-8")
    os.replace(part, path)


def _free(device: str) -> None:
    import gc

    gc.collect()
    if device == "cuda" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def pick_model(name: str, small: bool) -> str:
    """`auto`: a toy for a try, SmolLM2 where it is in the cache, else random weights of its shape."""
    if name != "auto":
        return name
    return "toy" if small else "smollm2" if hub.pulled_path("smollm2") is not None else "random-135m"


def summary(result: dict[str, Any]) -> str:
    """The main figures for people."""
    p = result["parts"]
    lines = []
    if env := p.get("environment"):
        lines.append(
            f"{env.get('card', env.get('device'))}, torch {env.get('versions', {}).get('torch')}, "
            f"{env.get('model')}; {env.get('operators')}; "
            f"{env.get('decode_steps')}"
        )
    if (suite := p.get("ops")) and "num" in suite:
        lines.append(
            f"operators: {suite['num'] - len(suite['failed'])} of {suite['num']} cases within tolerance"
        )
    if rows := p.get("tokens", {}).get("rows"):
        exact = [r for r in rows if r["precision"] == "exact"]
        equal, of = (sum(r[k] for r in exact) for k in ("equal", "of"))
        lines.append(f"tokens, exact: {equal} of {of} requests equal ({p['tokens'].get('wanted_from')})")
    for r in p.get("steps", {}).get("rows", []):
        how = "eager" if r["eager"] else "graphs"
        lines.append(
            f"decode step, {r['precision']}, {r['kernels']}, {how}: {r['rows']} rows at {r['context']}: "
            f"{1e3 * r['step_s']:.2f} ms, "
            f"device {1e3 * r['busy_s']:.2f} ms, {r['floor_share']:.0%} of the floor"
        )
    for r in p.get("bench", {}).get("rows", []):
        lines.append(
            f"{r['load']}, {r['contender']}: "
            + (f"{r['median']:,.0f} tokens/s" if r["median"] else r["note"])
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Checks operators, tokens, waits and speed on a GPU; one JSON file, under six minutes."
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu: tries the script, small, without a card",
    )
    parser.add_argument(
        "--model",
        default="auto",
        help=(
            "auto, smollm2, another model's name or folder, random-135m (random weights of SmolLM2's "
            "shape), toy"
        ),
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for all parts together")
    parser.add_argument("--dry-run", action="store_true", help="the same as --device cpu")
    parser.add_argument("--small", action="store_true", help="few and small cases")
    parser.add_argument("--in-process", action="store_true", help="all parts in this process")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, default=60.0, help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    device = "cpu" if a.dry_run else a.device
    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA card here; --dry-run tries the script without one", file=sys.stderr)
        return 2
    small = a.small or device == "cpu"
    model = pick_model(a.model, small)
    if a.part:
        run_part(a.part, Check(device, model, small, a.budget, a.out))
        return 0
    parts = [x.strip() for x in a.parts.split(",") if x.strip()]
    if unknown := [x for x in parts if x not in PARTS]:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    result = run(
        a.out,
        device=device,
        model=model,
        parts=parts,
        small=small,
        total_s=a.total,
        isolate=not (a.in_process or device == "cpu"),
    )
    print(summary(result))
    return 0 if all("raised" not in x and x.get("ok", True) for x in result["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
