"""Each fast operator against slower ones of the same meaning: microseconds a layer, bytes moved, and their
share of the memory's bandwidth.

On a CUDA card: the Triton kernels (products: torch's, as `triton_ops` calls them), plain torch operators for
any device, and the reference. On a CPU: the parts of the compiled pass, timed by itself, plain torch (gather
and one fused attention), and the reference. Rows have the same names on both, so two machines' tables can be
laid side by side.

The shape is SmolLM2-135M's, weights and caches are random. A call goes over several layers in turn, each with
weights and a cache of its own that together are larger than a processor's cache, and what is told is a
layer's share. Contenders run in turn; the median over rounds is told. Bytes are counted from shapes: what
must be read and written once; `share` is bytes over time over the bandwidth measured on this machine in this
run (CPU: `cost.calibrate`; card: one large copy, bytes read and written).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from cbviz.cost import calibrate
from cbviz.model import cpu_ops, cpu_pass, device_ops, native, ops, threads
from cbviz.model.decoder import Decoder, DecoderConfig, LayerWeights, Weights
from cbviz.model.kv_store import KVStore
from cbviz.model.matrix import Matrix, convert, num_bytes, to_device
from cbviz.model.ops import Batch, OpSet, Shape

HIDDEN, HEADS, HEADS_KV, DIM, INNER, VOCAB, BLOCK = 576, 9, 3, 64, 1536, 49152, 16
LAYERS = 12
_LEAST_S = 0.02
"""A short call is repeated until it takes about this long."""
_PRODUCTS = {
    "qkv": "QKV product",
    "gate_up": "gate and up product",
    "down": "down product",
    "head": "output head",
}
"""A layer's matrices, and the compiled pass's names for the parts that multiply with them."""
_SETTINGS = ((1, 1, 256), (8, 1, 256), (8, 1, 1024), (1, 128, 128), (1, 128, 1024))
"""(sequences, query tokens of each, length) of the attention rows."""


@dataclass(frozen=True)
class Row:
    operator: str
    setting: str
    contender: str
    us: float
    """Measured, a layer (head, choice: a call)."""
    bytes: float
    """Counted."""
    bytes_s: float
    share: float
    """Of the measured bandwidth. Above 1: the caches helped."""
    against_reference: float | None
    """How many times as fast as the reference, of the same round; None where that was not run."""


Clock = Callable[[], float]
"""Runs a contender once and says how many seconds a layer took."""


def run(
    *,
    device: str = "auto",
    precision: str = "fast",
    rounds: int = 7,
    quick: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Everything that this machine has.

    `quick`: one setting of each operator. Raises ConfigError for a device that is not there.
    """
    from cbviz.runners.torch_runner import pick_device

    where = pick_device(device)
    threads.use_available_cpus()
    bandwidth, name = _bandwidth(where)
    kept = torch.float32 if precision == "exact" else torch.float16
    fast = ops.pick("auto", where, Shape(HIDDEN, HEADS, HEADS_KV, DIM, BLOCK, kept))
    rows: list[Row] = []
    cases = list(_cases(where, fast, precision, kept, quick))
    with torch.inference_mode():
        for i, (operator, setting, num_bytes_moved, contenders) in enumerate(cases):
            if progress:
                progress(i, len(cases), f"{operator}, {setting}")
            for who, seconds, ratio in _contest(contenders(), rounds):
                rows.append(
                    Row(
                        operator,
                        setting,
                        who,
                        seconds * 1e6,
                        num_bytes_moved,
                        num_bytes_moved / seconds,
                        num_bytes_moved / seconds / bandwidth,
                        ratio,
                    )
                )
    return {
        "device": name,
        "device_kind": where.type,
        "threads": torch.get_num_threads() if where.type == "cpu" else None,
        "precision": precision,
        "operators": fast.about,
        "bandwidth_bytes_s": bandwidth,
        "rounds": rounds,
        "layers": LAYERS,
        "rows": [asdict(r) for r in rows],
    }


def table(result: dict[str, Any]) -> str:
    """The rows as text, and what was measured on."""
    threads_used = f", {result['threads']} threads" if result["threads"] else ""
    lines = [
        (
            f"measured on {result['device']}{threads_used}, precision {result['precision']}; operators: "
            f"{result['operators']}"
        ),
        (
            f"read bandwidth {result['bandwidth_bytes_s'] / 1e9:,.1f} GB/s; microseconds a layer, medians of "
            f"{result['rounds']} rounds; shape of SmolLM2-135M, random numbers"
        ),
        "",
        (
            f"{'operator':<16} {'setting':<26} {'with':<12} {'us':>10} {'GB/s':>9} {'share':>7} "
            f"{'x reference':>12}"
        ),
    ]
    before = ""
    for r in result["rows"]:
        same = f"{r['operator']} {r['setting']}"
        left = f"{r['operator']:<16} {r['setting']:<26}" if same != before else " " * 43
        ratio = (
            ""
            if r["against_reference"] is None or r["contender"] == "reference"
            else f"{r['against_reference']:,.1f}"
        )
        lines.append(
            f"{left} {r['contender']:<12} {r['us']:>10,.1f} {r['bytes_s'] / 1e9:>9,.2f} {r['share']:>7.0%} "
            f"{ratio:>12}"
        )
        before = same
    return "\n".join(lines)


def _contest(clocks: dict[str, Clock], rounds: int) -> Iterator[tuple[str, float, float | None]]:
    """(contender, median seconds a layer, median of the reference's over its)."""
    took: dict[str, list[float]] = {who: [] for who in clocks}
    for _ in range(rounds):
        for who, clock in clocks.items():
            took[who].append(clock())
    slow = took.get("reference")
    for who, seconds in took.items():
        yield (
            who,
            median(seconds),
            median(x / y for x, y in zip(slow, seconds, strict=True)) if slow else None,
        )


def _timed(call: Callable[[], object], where: torch.device) -> float:
    """Seconds; on a card between two events on its stream, so that the host's work is left out as far as the
    card is kept busy.
    """
    if where.type == "cpu":
        t = time.perf_counter()
        call()
        return time.perf_counter() - t
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(where)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(where)
    return begin.elapsed_time(end) / 1e3


def _clock(where: torch.device, layers: int, call: Callable[[int], object], capture: bool = False) -> Clock:
    """Times `call` over the layers in turn.

    `capture`: on a card as one CUDA graph, as decode steps run, so that launching is not what is measured.
    """

    def work() -> None:
        for i in range(layers):
            call(i)

    _timed(work, where)  # compiles, fills caches
    replay: Callable[[], object] = work
    if capture and where.type != "cpu":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay = graph.replay
    times = max(1, min(50, int(_LEAST_S / max(_timed(replay, where), 1e-6))))

    def repeat() -> None:
        for _ in range(times):
            replay()

    return lambda: _timed(repeat, where) / (layers * times)


def _part(
    compiled: cpu_pass.CompiledPass, name: str, batch: Batch, store: KVStore, positions: torch.Tensor
) -> Clock:
    """A part of whole passes of the compiled code, by the marks it sets itself; all tokens sample."""
    ids, rows, part = (
        torch.zeros(len(positions), dtype=torch.int64),
        torch.arange(len(positions)),
        cpu_pass.PARTS.index(name),
    )

    def clock() -> float:
        compiled.marking = True
        compiled(ids, positions, batch, store, rows)
        ends = [0.0, *(at for _, at in compiled.marks)]
        mine = [
            end - begin for (which, _), begin, end in zip(compiled.marks, ends, ends[1:]) if which == part
        ]
        return sum(mine) / (1 if name == "output head" else LAYERS)

    clock()
    return clock


Case = tuple[str, str, float, Callable[[], dict[str, Clock]]]


def _cases(
    where: torch.device, fast: OpSet, precision: str, kept: torch.dtype, quick: bool
) -> Iterator[Case]:
    """(operator, setting, bytes a layer, a function that sets the contenders up and warms them)."""
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).mul_(0.05)

    def weight(*shape: int) -> Matrix:
        return convert(random(*shape), precision)

    config = DecoderConfig(
        "llama", LAYERS, HIDDEN, HEADS, HEADS_KV, DIM, INNER, VOCAB, 8192, 1e-5, windows=(0,) * LAYERS
    )
    layers = [
        LayerWeights(
            torch.ones(HIDDEN),
            weight(config.q_size + 2 * config.kv_size, HIDDEN),
            weight(HIDDEN, config.q_size),
            torch.ones(HIDDEN),
            weight(2 * INNER, HIDDEN),
            weight(HIDDEN, INNER),
        )
        for _ in range(LAYERS)
    ]
    embed = weight(VOCAB, HIDDEN)
    plain = device_ops.TORCH if where.type != "cpu" else cpu_ops.CPU
    rivals: dict[str, OpSet] = {fast.name: fast, "torch": plain, "reference": ops.REFERENCE}
    if where.type == "cpu" or fast.name != "triton":
        rivals.pop(fast.name)
    compiled = None
    if where.type == "cpu" and (built := native.library()).lib is not None:
        made = Decoder(
            config,
            Weights(embed, layers, torch.ones(HIDDEN), embed, config.inverse_frequencies()),
            cpu_pass.op_set(built),
        )._whole
        compiled = made if isinstance(made, cpu_pass.CompiledPass) else None

    def scene(num_seqs: int, queries: int, length: int) -> tuple[Batch, KVStore, torch.Tensor]:
        """A batch, a cache with room for it, and positions."""
        per = -(-length // BLOCK)
        store = KVStore(LAYERS, num_seqs * per + 1, HEADS_KV, BLOCK, DIM, dtype=kept)
        for part in store.parts:
            part.copy_(torch.randn(part.shape[1:], generator=g).to(part.dtype).expand_as(part))
        if where.type != "cpu":
            moved = KVStore(LAYERS, store.num_blocks, HEADS_KV, BLOCK, DIM, where, kept)
            for to, part in zip(moved.parts, store.parts, strict=True):
                to.copy_(part)
            store = moved
        batch = Batch.build(
            [list(range(1 + i * per, 1 + (i + 1) * per)) for i in range(num_seqs)],
            [queries] * num_seqs,
            [length] * num_seqs,
            BLOCK,
            device=where,
        )
        return batch, store, torch.arange(length - queries, length).repeat(num_seqs)

    each = 2 * HEADS_KV * DIM * kept.itemsize
    inputs = 4 if precision == "exact" or where.type == "cpu" else 2
    for num_seqs, queries, length in _SETTINGS[1:2] if quick else _SETTINGS:
        n = num_seqs * queries
        setting = f"{num_seqs} x {length} keys" if queries == 1 else f"{queries} queries, {length} keys"

        def attention(
            num_seqs: int = num_seqs, queries: int = queries, length: int = length, n: int = n
        ) -> dict[str, Clock]:
            batch, store, positions = scene(num_seqs, queries, length)
            q = torch.randn(n, HEADS, DIM).to(where)
            out: dict[str, Clock] = (
                {}
                if compiled is None
                else {"compiled": _part(compiled, "attention", batch, store, positions)}
            )

            def attend(o: OpSet, x: torch.Tensor, i: int) -> torch.Tensor:
                return o.attention(x, store.layers[i], batch, DIM**-0.5, 0)

            for who, o in rivals.items():
                fast_one = who != "reference"
                out[who] = _clock(
                    where,
                    LAYERS if fast_one else 1,
                    partial(attend, o, q.half() if inputs == 2 and fast_one else q),
                    capture=fast_one and queries == 1,
                )
            return out

        yield "attention", setting, num_seqs * length * each + 2 * n * HEADS * DIM * inputs, attention
    for n in (8,) if quick else (1, 8, 64):

        def turn(n: int = n) -> dict[str, Clock]:
            batch, store, positions = scene(n, 1, 64)
            qkv, angle = (
                torch.randn(n, (HEADS + 2 * HEADS_KV) * DIM).to(where),
                torch.randn(n, DIM // 2).to(where),
            )
            cos, sin = angle.cos(), angle.sin()

            def both(o: OpSet, i: int) -> None:
                if o.rope_and_write is not None:
                    o.rope_and_write(qkv, cos, sin, None, None, 1e-5, HEADS, store.layers[i], batch)
                    return
                heads = qkv.view(n, -1, DIM)
                turned = o.rope(heads[:, : HEADS + HEADS_KV], cos, sin)
                o.write_kv(turned[:, HEADS:], heads[:, HEADS + HEADS_KV :], store.layers[i], batch)

            out: dict[str, Clock] = (
                {}
                if compiled is None
                else {"compiled": _part(compiled, "rotary and KV write", batch, store, positions)}
            )
            for who, o in rivals.items():
                out[who] = _clock(
                    where, LAYERS if who != "reference" else 1, partial(both, o), capture=who != "reference"
                )
            return out

        yield (
            "rotate and write",
            f"{n} tokens",
            n * (4 * (HEADS + 2 * HEADS_KV) * DIM + inputs * HEADS * DIM + each + 8 * DIM // 2),
            turn,
        )
    for n in (8,) if quick else (1, 8, 64):
        for name in ("qkv", "gate_up", "down", "head"):
            matrices = [embed] if name == "head" else [getattr(layer, name) for layer in layers]
            rows_out, width = matrices[0].shape

            def product(
                n: int = n, name: str = name, matrices: list[Matrix] = matrices, width: int = width
            ) -> dict[str, Clock]:
                batch, store, positions = scene(n, 1, 64)
                x = torch.randn(n, width).to(where)
                out: dict[str, Clock] = (
                    {}
                    if compiled is None
                    else {"compiled": _part(compiled, _PRODUCTS[name], batch, store, positions)}
                )
                for who, o in rivals.items():
                    if who == "torch" and precision == "int8" and where.type != "cpu":
                        continue
                    packed = [o.pack(to_device(m, where)) for m in matrices]
                    fast_one = who != "reference"
                    out[who] = _clock(
                        where,
                        len(matrices) if fast_one else 1,
                        partial(_multiply, o, x.half() if inputs == 2 and fast_one else x, packed),
                        capture=fast_one,
                    )
                return out

            # The compiled parts hold the norm before, and the gate or the sum behind; their bytes stay in the
            # caches.
            yield (
                f"product {name}",
                f"{n} rows",
                float(num_bytes(matrices[0])) + n * (inputs * width + 4 * rows_out),
                product,
            )
    for n in (8,) if quick else (1, 8, 64):

        def norm(n: int = n) -> dict[str, Clock]:
            x, residual, w = (
                torch.randn(n, HIDDEN).to(where),
                torch.randn(n, HIDDEN).to(where),
                torch.ones(HIDDEN, device=where),
            )

            def add_norm(o: OpSet, i: int) -> object:
                return o.add_rms_norm(x, residual, w, 1e-5)

            return {
                who: _clock(where, LAYERS, partial(add_norm, o), capture=True) for who, o in rivals.items()
            }

        def gate(n: int = n) -> dict[str, Clock]:
            x = torch.randn(n, 2 * INNER).to(where)

            def gated(o: OpSet, i: int) -> object:
                return o.silu_mul(x)

            return {who: _clock(where, LAYERS, partial(gated, o), capture=True) for who, o in rivals.items()}

        yield "add and norm", f"{n} rows", n * HIDDEN * (12 + inputs), norm
        yield "gate", f"{n} rows", n * INNER * (8 + inputs), gate
    for n in (8,) if quick else (1, 8, 64):

        def choice(n: int = n) -> dict[str, Clock]:
            logits = torch.randn(n, VOCAB).to(where)
            choosers = {} if compiled is None else {"compiled": ops.pick("auto", where)}
            return {
                who: _clock(where, 1, partial(_choose, o, logits))
                for who, o in (choosers | {k: v for k, v in rivals.items() if k != "torch"}).items()
            }

        yield "choose", f"{n} rows", n * VOCAB * 4.0, choice


def _choose(o: OpSet, logits: torch.Tensor, i: int) -> object:
    return o.choose(logits)


def _multiply(o: OpSet, x: torch.Tensor, packed: list[Any], i: int) -> torch.Tensor:
    return o.linear(x, packed[i], None)


def _bandwidth(where: torch.device) -> tuple[float, str]:
    """Measured bytes a second, and the device's name."""
    if where.type == "cpu":
        spec = calibrate.measure()
        return spec.bandwidth_bytes_s, calibrate.cpu_name()
    a = torch.empty(1 << 28, device=where)
    b = torch.empty_like(a)
    seconds = min(_timed(lambda: b.copy_(a), where) for _ in range(10))
    return 2 * a.nbytes / seconds, torch.cuda.get_device_name(where)
