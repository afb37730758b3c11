"""The whole engine against other people's, on the same weights, requests and threads, in turn in one run.

Two loads: the article's (20 requests, all there at the start, greedy, end of sequence ignored) with some
seats, and a single stream. Ours runs as everybody uses it: scheduler, recorder and reasons included. Others:
transformers' `generate` in static batches, padded on the left, every row running to its batch's longest, and
its own continuous batching; vLLM's CPU build and llama.cpp, each in a Python of its own where one is named.
One round is every contender once, in turn; what is told are medians over rounds and ratios of the same round.
All figures are measured, here and now: on another machine, or beside other work, the tokens a second differ
and the ratios less so.

The floor of a decode step is the time to read its weights and KV (counted) at the bandwidth that
`cost.calibrate` measured.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import psutil

import cbviz.model  # noqa: F401  before torch: it settles how torch's threads wait

# isort: split
import torch

from cbviz import workload
from cbviz.bench import decode, engine_worker, floors
from cbviz.bench.peer import PeerError, Worker, find_python
from cbviz.config import ConfigError, EngineConfig
from cbviz.cost import calibrate
from cbviz.messages import RequestSpec, Sampling
from cbviz.model import hub, ops, threads
from cbviz.model.loader import LoadedModel, load
from cbviz.model.matrix import PRECISIONS
from cbviz.model.quality import quality
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from cbviz.workload import texts

Requests = list[tuple[list[int], int]]
"""Prompt ids and output tokens of each."""
Tell = Callable[[int, int, str], None]
NUM_BLOCKS = 512
BLOCK_SIZE = 16
ALONE = (91, 64)
"""Prompt and output tokens of the single stream."""
SLOW_S = 60.0
"""Whose first run of a load takes longer does not run that load again: transformers' continuous batching
takes minutes on a CPU, where each step computes attention scores of all its tokens against the KV of all
requests, masked.
"""


@dataclass(frozen=True)
class Timing:
    """One contender under one load.

    `tokens_per_s`: output tokens over wall time, prefill included, one figure a round; one figure alone of
    who is slow.
    """

    tokens_per_s: list[float]
    floor_share: float | None = None
    """Of decode-only steps: the floor over the step's time, median over steps. Ours only."""

    @property
    def median(self) -> float:
        return median(self.tokens_per_s)


@dataclass(frozen=True)
class Load:
    """`name`: `article` or `alone`. `contenders`: by name."""

    name: str
    seats: int
    num_requests: int
    output_tokens: int
    contenders: dict[str, Timing] = field(default_factory=dict)

    def ratio(self, a: str, b: str) -> list[float]:
        """Speed of a over that of b, one figure a round in which both ran."""
        return [
            x / y
            for x, y in zip(self.contenders[a].tokens_per_s, self.contenders[b].tokens_per_s, strict=False)
        ]


class Contender(Protocol):
    name: str

    def run(self, requests: Requests, seats: int) -> tuple[float, int]:
        """Seconds and output tokens."""


class Ours:
    """A session in one precision. `shares`: of the last run's decode-only steps, the floor over the time."""

    def __init__(self, model: LoadedModel, precision: str, bandwidth_bytes_s: float) -> None:
        self.name = precision
        self._bandwidth = bandwidth_bytes_s
        self._runner = TorchRunner(
            model, EngineConfig(precision=precision, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        )
        self.shares: list[float] = []

    def run(self, requests: Requests, seats: int) -> tuple[float, int]:
        self._runner.reset()
        specs = [
            RequestSpec(f"r{i}", tuple(ids), n, arrival_step=0, sampling=Sampling(ignore_eos=True))
            for i, (ids, n) in enumerate(requests)
        ]
        t0 = perf_counter()
        s = Session(
            specs,
            runner=self._runner,
            precision=self.name,
            clock="measured",
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=seats,
            enable_prefix_caching=False,
        )
        s.run()
        seconds = perf_counter() - t0
        steps = [
            r for r in s.trace if r.counted and r.measured_s and all(c.num_tokens == 1 for c in r.chunks)
        ]
        self.shares = [
            (r.counted["weight_bytes"] + r.counted["kv_bytes"]) / self._bandwidth / r.measured_s  # type: ignore[index, operator]
            for r in steps
        ]
        return seconds, sum(len(s.request(i).output_token_ids) for i in s.request_ids)


class Transformers:
    """`generate` in static batches in the order of arrival: each as long as its longest row. float32 on the
    CPU unless told otherwise.
    """

    def __init__(self, folder: Path, device: str = "cpu", kind: torch.dtype = torch.float32) -> None:
        import transformers

        self.name = f"transformers {transformers.__version__}"
        self.device = device
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval().to(device)

    @torch.inference_mode()
    def run(self, requests: Requests, seats: int) -> tuple[float, int]:
        t0 = perf_counter()
        for i in range(0, len(requests), seats):
            batch = requests[i : i + seats]
            width, longest = max(len(ids) for ids, _ in batch), max(n for _, n in batch)
            ids = torch.tensor([[0] * (width - len(x)) + x for x, _ in batch], device=self.device)
            mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x, _ in batch], device=self.device)
            self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
            ).tolist()  # waits for a card
        return perf_counter() - t0, sum(
            n for _, n in requests
        )  # what was asked for; the tokens behind a row's end are nobody's


class ContinuousTransformers:
    """transformers' own continuous batching in float32: paged attention through SDPA, pages of 16 tokens, as
    many requests a batch as there are seats.
    """

    def __init__(self, folder: Path, seats: int, room: int) -> None:
        import transformers
        from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        config = ContinuousBatchingConfig(
            page_size=BLOCK_SIZE,
            num_blocks=seats * (room // BLOCK_SIZE + 2),
            max_batch_tokens=256,
            max_requests_per_batch=seats,
            allow_block_sharing=False,
        )
        # -1: no token ends a request.
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=config,
        )
        self._manager.start()

    def run(self, requests: Requests, seats: int) -> tuple[float, int]:
        t0 = perf_counter()
        asked = {self._manager.add_request(list(ids), max_new_tokens=n) for ids, n in requests}
        produced = 0
        while asked:
            result = self._manager.get_result(timeout=60)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended before its requests did")
                continue
            if result.error is not None:
                raise RuntimeError(f"transformers' continuous batching: {result.error}")
            asked.discard(result.request_id)
            produced += len(result.generated_tokens)
        return perf_counter() - t0, produced

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)


class Turned:
    """A contender that is made for each of its turns and then ended; making it does not count."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._make = make

    def run(self, requests: Requests, seats: int) -> tuple[float, int]:
        contender = self._make()
        try:
            contender.run([(ids, 1) for ids, _ in requests[:1]], seats)
            return contender.run(requests, seats)
        finally:
            contender.close()


class Foreign:
    """An engine in another Python.

    `seats`: sequences at once, at most. What it raises later is a PeerError that names it.
    """

    def __init__(self, kind: str, python: str, model: Path, num_threads: int, seats: int, room: int) -> None:
        self._worker = Worker(python, engine_worker.__file__, kind)
        try:
            self.name = str(self._worker.ask("hello")["version"])
            self._worker.ask("load", model=str(model), threads=num_threads, seats=seats, room=room)
        except PeerError as e:
            self._worker.close()
            raise ConfigError(f"{kind} does not run in {python}: {e}") from e

    def run(self, requests: Requests, seats: int) -> tuple[float, int]:
        answer = self._ask("run", requests=requests, seats=seats)
        return float(answer["seconds"]), int(answer["tokens"])

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        return [float(s) for s in self._ask("decode", prompts=prompts, steps=steps)["seconds"]]

    def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        try:
            return self._worker.ask(op, **fields)
        except PeerError as e:
            raise PeerError(f"{self.name}: {e}") from e

    def close(self) -> None:
        self._worker.close()


def article(share: float, vocab: int, num_requests: int = 20) -> Requests:
    """The article's requests, every output cut to `share` of its length."""
    specs = workload.build("article", seed=0, model_vocab=vocab, tokenizer=None, num_requests=num_requests)
    return [(list(s.prompt_token_ids), max(1, round(s.max_tokens * share))) for s in specs]


def export(model: LoadedModel, folder: Path) -> None:
    """The model as the hub has it, float32, for other engines to load.

    Llama without biases and scaling only; raises ConfigError otherwise.
    """
    c, w = model.config, model.weights
    if c.architecture != "llama" or c.rope_scaling or any(layer.qkv_bias is not None for layer in w.layers):
        raise ConfigError(
            f"{model.title}: only a plain Llama is handed to other engines; bench with --model smollm2, or "
            "without them"
        )
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {"model.embed_tokens.weight": w.embed, "model.norm.weight": w.norm}
    if not c.tied_embeddings:
        tensors["lm_head.weight"] = w.head
    for i, layer in enumerate(w.layers):
        assert isinstance(layer.qkv, torch.Tensor) and isinstance(layer.gate_up, torch.Tensor)
        q, k, v = layer.qkv.split([c.q_size, c.kv_size, c.kv_size])
        gate, up = layer.gate_up.chunk(2)
        names = {
            "input_layernorm": layer.attn_norm,
            "post_attention_layernorm": layer.mlp_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        tensors |= {f"model.layers.{i}.{n}.weight": t for n, t in names.items()}
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    about = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_context,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tied_embeddings,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(about), "utf-8")


def measure(
    name: str,
    requests: Requests,
    seats: int,
    contenders: Sequence[Contender],
    rounds: int,
    tell: Callable[[str], None],
    lost: dict[str, str] | None = None,
) -> Load:
    """Every contender once a round, in turn; who is slow (`SLOW_S`) in the first alone.

    A short run of each comes first and does not count.

    An engine in another process that fails goes into `lost` (name, what it said) and is asked no more, here
    and by whoever brings the same `lost` again.
    """
    lost = {} if lost is None else lost
    speeds: dict[str, list[float]] = {c.name: [] for c in contenders}
    shares: dict[str, list[float]] = {}
    wanted = sum(n for _, n in requests)

    def turn(c: Contender, what: Requests) -> tuple[float, int] | None:
        if c.name in lost:
            return None
        gc.collect()
        try:
            return c.run(what, seats)
        except PeerError as e:
            lost[c.name] = str(e)
            return None

    for c in contenders:
        tell(f"{name}: {c.name} warms up")
        turn(c, [(ids, 2) for ids, _ in requests[:seats]])
    for i in range(rounds):
        for c in contenders:
            tell(f"{name}, round {i + 1}: {c.name}")
            if i and speeds[c.name] and wanted / speeds[c.name][0] > SLOW_S:
                continue
            if (ran := turn(c, requests)) is None:
                continue
            seconds, produced = ran
            if produced != wanted:
                raise RuntimeError(f"{c.name} made {produced} tokens, {wanted} were asked for")
            speeds[c.name].append(produced / seconds)
            if isinstance(c, Ours):
                shares.setdefault(c.name, []).extend(c.shares)
    return Load(
        name,
        seats,
        len(requests),
        wanted,
        {n: Timing(v, median(shares[n]) if shares.get(n) else None) for n, v in speeds.items() if v},
    )


def run(
    *,
    model: str = "smollm2",
    precisions: Sequence[str] = PRECISIONS,
    seats: int = 8,
    rounds: int = 3,
    share: float = 1.0,
    num_requests: int = 20,
    vllm_python: str | None = None,
    llama_python: str | None = None,
    with_transformers: bool = True,
    decode_rounds: int = 5,
    progress: Tell | None = None,
) -> dict[str, Any]:
    """Everything as plain data.

    Raises ConfigError for an engine that was named and cannot be had, ModelError for the model.
    """
    count = threads.use_available_cpus()
    tell = progress or (lambda done, total, note: None)
    source = hub.resolve(model)
    loaded = load(source)
    device = calibrate.measure()
    bandwidth = device.bandwidth_bytes_s
    requests = article(share, loaded.config.vocab_size, num_requests)
    prompt, output = ALONE
    alone: Requests = [
        (
            [100 + 37 * i % 30_000 % (loaded.config.vocab_size - 100) for i in range(prompt)],
            max(1, round(output * share)),
        )
    ]
    room = max(len(ids) + n for ids, n in [*requests, *alone]) + 32
    notes: list[str] = []
    llama: list[Foreign] = []
    python = find_python(vllm_python)
    with ExitStack() as stack:
        contenders: list[Contender] = [Ours(loaded, p, bandwidth) for p in precisions]
        if python or with_transformers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cbviz-bench-")))
            export(loaded, folder)
        if with_transformers:
            if importlib.util.find_spec("transformers") is None:
                notes.append("transformers is not installed here: not measured")
            else:
                static = Transformers(folder)
                # The thread of the other one polls while it has nothing to do, so it is there only for its
                # turn.
                contenders += [
                    static,
                    Turned(
                        static.name.replace(" ", "-continuous ", 1),
                        lambda: ContinuousTransformers(folder, seats, room),
                    ),
                ]
        for kind, where, path in (("vllm", python, None), ("llama", llama_python, source.path)):
            if where is None:
                notes.append(f"{kind}: not measured, --{kind}-python names a Python that has it")
            elif kind == "llama" and source.kind != "gguf":
                notes.append("llama.cpp: not measured, it reads GGUF files only")
            else:
                tell(0, 1, f"starting {kind}")
                held = (
                    max(seats, *decode.BATCHES) if kind == "llama" and decode_rounds else seats
                )  # sequences that llama.cpp has room for
                peer = Foreign(kind, where, path or folder, count, held, room)
                stack.callback(peer.close)
                contenders.append(peer)
                if kind == "llama":
                    llama.append(peer)
        loads, done, total = [], 0, 2 * (rounds + 1) * len(contenders)
        lost: dict[str, str] = {}

        def step(note: str) -> None:
            nonlocal done
            tell(done, total, note)
            done += 1

        for name, what, n in (("article", requests, seats), ("alone", alone, 1)):
            loads.append(measure(name, what, n, contenders, rounds, step, lost))
        steps = (
            decode.measure(
                loaded, precisions, llama, decode_rounds, lambda note: tell(done, total, note), lost
            )
            if decode_rounds
            else []
        )
    notes += [f"failed, and was asked no more: {said}" for said in lost.values()]
    tell(done, total, "comparing with float32")
    tokenizer = loaded.tokenizer
    judged = (
        [tokenizer.chat(t) for t in texts.CHAT[:8]]
        if tokenizer is not None
        else [ids for ids, _ in requests[:8]]
    )
    return {
        "model": loaded.title,
        "threads": count,
        "kernels": ops.pick("auto", "cpu").about,
        "clock": "measured",
        "rounds": rounds,
        "output_share": share,
        "device": asdict(device),
        "notes": notes,
        "loads": [
            {
                "name": x.name,
                "seats": x.seats,
                "requests": x.num_requests,
                "output_tokens": x.output_tokens,
                "contenders": {
                    n: {"tokens_per_s": t.tokens_per_s, "median": t.median, "floor_share": t.floor_share}
                    for n, t in x.contenders.items()
                },
                "ratios": {p: {o: median(x.ratio(p, o)) for o in x.contenders if o != p} for p in precisions},
            }
            for x in loads
        ],
        "decode": decode.data(steps, precisions),
        "quality": {p: asdict(quality(loaded, p, judged)) for p in precisions if p != "exact"},
        "resident_bytes": psutil.Process().memory_info().rss,
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    others = {
        n: f"/ {n.split()[0]}" for n in result["loads"][0]["contenders"] if n not in PRECISIONS
    }  # who is lost in a later load was in the first
    widths = {n: max(16, len(head) + 2) for n, head in others.items()}
    lines = [
        f"{result['model']}, {result['threads']} threads, {result['kernels']}",
        (
            f"{result['rounds']} rounds, everybody in turn; medians; output tokens a second, prefill "
            "included, "
            "measured here and now: compare within a row"
        ),
    ]
    for x in result["loads"]:
        what = f"{x['requests']} requests, {x['seats']} seats" if x["name"] == "article" else "one request"
        lines += ["", f"{x['name']}: {what}, {x['output_tokens']:,} output tokens"]
        wide = max(len(n) for n in x["contenders"]) + 2
        head = (
            f"{'':{wide}}{'tokens/s':>9}"
            + "".join(f"{o:>{widths[n]}}" for n, o in others.items())
            + f"{'of the floor':>14}"
        )
        lines.append(head)
        for n, t in x["contenders"].items():
            ratios = "".join(
                f"{x['ratios'][n][o]:>{w}.2f}" if o in x["ratios"].get(n, {}) else " " * w
                for o, w in widths.items()
            )
            share = f"{t['floor_share']:>13.0%}" if t["floor_share"] is not None else ""
            lines.append(f"{n:{wide}}{t['median']:>9.1f}{ratios} {share}".rstrip())
        lines += [
            (
                f"{n}: {len(t['tokens_per_s'])} of {result['rounds']} rounds, a run takes "
                f"{x['output_tokens'] / t['median']:.0f} s"
            )
            for n, t in x["contenders"].items()
            if len(t["tokens_per_s"]) < result["rounds"]
        ]
    lines += [
        "",
        (
            "The floor: reading weights and KV once a step at "
            f"{result['device']['bandwidth_bytes_s'] / 1e9:.1f} GB/s (measured); share of it in decode-only "
            "steps."
        ),
    ]
    if result["decode"]:
        lines += decode.table(
            result["decode"], [n for n in result["decode"][0]["contenders"] if n not in PRECISIONS]
        )
        lines.append("Of the floor: reading weights and KV at the bandwidth that was read in the same round.")
    for p, q in result["quality"].items():
        lines.append(
            f"{p} against float32 over {q['positions']:,} positions: largest logit error "
            f"{q['max_logit_error']:.3f} (largest logit {q['max_logit']:.0f}), "
            f"same best token {q['agreement']:.1%}"
        )
    return "\n".join([*lines, *floors.lines(result), *result["notes"]])


__all__ = ["Load", "Timing", "article", "export", "measure", "run", "table"]
