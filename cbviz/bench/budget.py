"""What the Triton kernels need of a card, compiled without one and held against a committed budget: `python
-m cbviz.bench.budget`.

Owns the list of launches and the comparison. The launches are not written down a second time: the launchers
of `cbviz.model.triton_ops` are called with empty tensors and what they would have launched is recorded, so
that the compiled kernels are those that the engine runs, tiles and specialisations included. Each is compiled
by `cbviz.kernels.aot` for the cards named there.

A launch must compile, spill no register, keep within the card's shared memory, use the matrix units for
16-bit attention, load 16 bytes a time, and make block ids 64 bits wide before they are multiplied. Its
registers and shared memory may not grow by more than a tenth over `kernels/budget.json`; a figure that fell
by as much is told, so that the budget follows. `--write` takes the present figures as the budget.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cbviz.model import triton_ops
from cbviz.model.kv_store import KVLayer
from cbviz.model.ops import Batch

GROWTH = 0.1
CARDS = ("sm_80", "sm_90", "gfx942")
HELD = ("registers", "shared_bytes")
"""What is compared with the budget; the rest has fixed limits."""
_F32, _F16 = torch.float32, torch.float16


@dataclass(frozen=True)
class Case:
    """One launch. `name`: what for, kernel and shape; `matrix`: it must use the matrix units; `blocks`: it
    multiplies block ids.
    """

    name: str
    module: str
    kernel: str
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    matrix: bool = False
    wide: bool = True


class _Recorded:
    """Stands in for a kernel: `kernel[grid](...)` notes the launch and does nothing."""

    def __init__(
        self, module: str, name: str, note: Callable[[str, str, tuple[Any, ...], dict[str, Any]], None]
    ) -> None:
        self._module, self._name, self._note = module, name, note

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self._note(self._module, self._name, args, kwargs)


def cases() -> list[Case]:
    """Every launch that an engine on a card can make: both types, head sizes 64, 128 (and one that is no
    power of two), with and without a window, caches of 8 and 4 bits.
    """
    found: dict[str, Case] = {}
    prefix = ""

    def note(module: str, kernel: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kernel == "join" and not prefix.startswith("f16 D64"):
            return  # a small kernel that hardly differs
        warps, stages = kwargs.pop("num_warps", 4), kwargs.pop("num_stages", 3)
        product = kernel in ("decode", "prefill")
        case = Case(
            f"{kernel} {prefix}",
            module,
            kernel,
            tuple(_plain(a) for a in args),
            kwargs,
            warps,
            stages,
            matrix=product and kwargs["DTYPE"].name != "fp32",
            wide=kernel not in ("best_of_row", "draw"),
        )
        found.setdefault(case.name, case)

    real = triton_ops.kernel_modules()
    standing_in = SimpleNamespace(
        **{
            name: SimpleNamespace(
                **{
                    n: _Recorded(m.__name__, n, note)
                    if hasattr(getattr(m, n), "arg_names")
                    else getattr(m, n)
                    for n in dir(m)
                }
            )
            for name, m in vars(real).items()
        }
    )
    for what, launch in _launches(standing_in):
        prefix = what  # `note` reads it
        launch()
    return [found[name] for name in sorted(found)]


def _launches(kernels: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """(what for, a call that launches)."""
    tokens = 160
    batch = Batch.build([list(range(1, 41)), list(range(40, 60))], [1, tokens - 1], [600, 300], 16)
    for kind, name in ((_F16, "f16"), (_F32, "f32")):
        o = triton_ops.Launcher(kernels, kind)
        for heads, heads_kv, dim in ((9, 3, 64), (32, 8, 128), (8, 8, 80)):
            shape = f"{name} D{dim} G{heads // heads_kv}"
            layer = KVLayer(*(torch.empty(64, heads_kv, 16, dim, dtype=kind) for _ in range(2)))
            q, angle, qkv = (
                torch.empty(tokens, heads, dim, dtype=kind),
                torch.empty(tokens, dim // 2),
                torch.empty(tokens, (heads + 2 * heads_kv) * dim),
            )
            if dim != 80 or kind == _F16:
                yield shape, partial(o.attention, q, layer, batch, 0.125, 0)
            if dim == 64:
                yield f"{shape} window", partial(o.attention, q, layer, batch, 0.125, 100)
            if dim == 64:
                yield (
                    f"{shape} whole",
                    partial(o.attention, q[:2], layer, Batch.build([[1], [2]], [1, 1], [9, 9], 16), 0.125, 0),
                )
                yield (
                    shape,
                    partial(o.rope_and_write, qkv, angle, angle, None, None, 1e-5, heads, layer, batch),
                )
            if dim == 128 and kind == _F16:
                norm = torch.empty(dim)
                yield (
                    f"{shape} normed",
                    partial(o.rope_and_write, qkv, angle, angle, norm, norm, 1e-5, heads, layer, batch),
                )
        if kind == _F16:
            for storage, bits in ((torch.int8, 8), (torch.uint8, 4)):
                for heads, heads_kv, dim in ((9, 3, 64), (32, 8, 128)):
                    kept, beside = (
                        torch.empty(64, heads_kv, 16, dim * bits // 8, dtype=storage),
                        torch.empty(64, heads_kv, 16, dtype=_F16),
                    )
                    coded = KVLayer(kept, kept, beside, beside, *((beside, beside) if bits == 4 else ()))
                    shape = f"int{bits} D{dim} G{heads // heads_kv}"
                    yield shape, partial(o.attention, torch.empty(tokens, heads, dim), coded, batch, 0.125, 0)
                    if dim == 64:
                        k = torch.empty(tokens, heads_kv, dim)
                        yield shape, partial(o.write_kv, k, k, coded, batch)
        for hidden, inner in ((576, 1536), (4096, 14336))[: 2 if kind == _F16 else 1]:
            yield (
                f"{name} {hidden}",
                partial(
                    o.add_rms_norm,
                    torch.empty(tokens, hidden),
                    torch.empty(tokens, hidden),
                    torch.empty(hidden),
                    1e-5,
                ),
            )
            yield f"{name} {inner}", partial(o.silu_mul, torch.empty(tokens, 2 * inner))
    heads_kv, dim = 3, 64
    k = torch.empty(tokens, 5 * heads_kv, dim)[:, :heads_kv]
    yield (
        "f16 D64",
        lambda: o.write_kv(
            k, k, KVLayer(*(torch.empty(64, heads_kv, 16, dim, dtype=_F16) for _ in range(2))), batch
        ),
    )
    yield "f32 D64", lambda: o.rope(k, torch.empty(tokens, dim // 2), torch.empty(tokens, dim // 2))
    yield "49152", lambda: o.choose_on_device(torch.empty(8, 49152))
    column = torch.empty(8, dtype=torch.float64)
    yield (
        "49152",
        lambda: o.draw(torch.zeros(8, 49152), column, torch.zeros(8, dtype=torch.int64), column, column),
    )


def _plain(x: Any) -> Any:
    """An argument without its memory: the type is all that a compile asks of a tensor."""
    return SimpleNamespace(dtype=str(x.dtype)) if isinstance(x, torch.Tensor) else x


def compile_case(case: Case, card: str) -> dict[str, Any]:
    """The figures of one launch on one card, or `{"error": ...}`."""
    import cbviz.kernels.aot as aot

    fn = getattr(importlib.import_module(case.module), case.kernel)
    try:
        return dict(aot.build(fn, case.args, case.constants, card, case.num_warps, case.num_stages)._asdict())
    except Exception as e:  # whatever the compiler raises is the finding
        return {"error": f"{type(e).__name__}: {e}"[:300]}


def measure(
    cards: tuple[str, ...] = CARDS,
    jobs: int = 2,
    only: str = "",
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """`case on card` -> figures.

    Compiles in `jobs` processes, in a cache folder of their own, so that nothing old is read.
    """
    # AMD's compiler is asked about what it could refuse or spill: the products.
    wanted = [
        (c, card)
        for c in cases()
        for card in cards
        if only in c.name
        and (card.startswith("sm_") or (c.name.endswith(("G3", "G4")) and c.kernel in ("decode", "prefill")))
    ]
    out: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="cbviz-triton-") as folder:
        previous = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
                for i, ((case, card), figures) in enumerate(
                    zip(wanted, pool.map(compile_case, *zip(*wanted, strict=True)), strict=True), 1
                ):
                    out[f"{case.name} on {card}"] = figures
                    if progress:
                        progress(i, len(wanted), f"{case.name} on {card}")
        finally:
            if previous is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = previous
    return out


def faults(
    found: Mapping[str, Mapping[str, Any]],
    budget: Mapping[str, Mapping[str, Any]],
    whole: bool = True,
    same_compiler: bool = True,
) -> list[str]:
    """What is wrong, a line each.

    `whole`: also what the budget has and was not found. `same_compiler`: registers and shared memory can be
    compared.
    """
    import cbviz.kernels.aot as aot

    by_name = {c.name: c for c in cases()}
    out = []
    for name, f in found.items():
        case, card = by_name[name.rpartition(" on ")[0]], name.rpartition(" on ")[2]
        if "error" in f:
            out.append(f"{name}: does not compile: {f['error']}")
            continue
        if f["spills"]:
            out.append(f"{name}: {f['spills']} instructions spill registers")
        if f["shared_bytes"] > aot.SHARED_BYTES[card]:
            out.append(
                f"{name}: {f['shared_bytes']:,} bytes of shared memory, the card has "
                f"{aot.SHARED_BYTES[card]:,}"
            )
        if case.matrix and not f["matrix"]:
            out.append(f"{name}: no matrix instruction")
        if case.wide and card.startswith("sm_") and not f["wide_loads"]:
            out.append(f"{name}: no load of 16 bytes")
        if not f["long_blocks"]:
            out.append(f"{name}: a block id is multiplied in 32 bits")
        held = budget.get(name)
        if held is None:
            out.append(f"{name}: not in the budget")
            continue
        if same_compiler:
            out += [
                f"{name}: {key} {held[key]:,} -> {f[key]:,} (+{f[key] / max(held[key], 1) - 1:.0%})"
                for key in HELD
                if f[key] > held[key] * (1 + GROWTH)
            ]
    if whole:
        out += [f"{name}: in the budget, but no such launch" for name in budget if name not in found]
    return out


def better(found: Mapping[str, Mapping[str, Any]], budget: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Figures that fell by a tenth or more."""
    return [
        f"{name}: {key} {budget[name][key]:,} -> {f[key]:,} ({f[key] / budget[name][key] - 1:.0%})"
        for name, f in found.items()
        if name in budget and "error" not in f
        for key in HELD
        if f[key] < budget[name][key] * (1 - GROWTH)
    ]


def budget_path() -> Path:
    import cbviz.kernels.tiles as tiles

    return Path(str(tiles.__file__)).with_name("budget.json")


def load() -> dict[str, dict[str, Any]]:
    return dict(json.loads(budget_path().read_text("utf-8"))["launches"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cbviz.bench.budget",
        description="Compiles the Triton kernels for absent cards and holds them against kernels/budget.json.",
    )
    parser.add_argument("--write", action="store_true", help="take the present figures as the budget")
    parser.add_argument("--only", default="", help="launches whose name has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    asked = parser.parse_args()
    import cbviz.kernels.aot as aot

    if triton_ops.interpreted():
        sys.exit("TRITON_INTERPRET=1 is set: nothing is compiled then; unset it")
    found = measure(
        jobs=asked.jobs,
        only=asked.only,
        progress=lambda i, n, note: print(f"\r{i} of {n} {note:<60}", end="", file=sys.stderr),
    )
    print(file=sys.stderr)
    if asked.write:
        kept = {**load(), **found} if asked.only else found
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
        budget_path().write_text(
            f'{{"triton": "{aot.VERSION}", "launches": {{\n{lines}\n}}}}\n', encoding="utf-8"
        )
    made_with = json.loads(budget_path().read_text("utf-8"))["triton"]
    wrong = faults(found, load(), whole=not asked.only, same_compiler=made_with == aot.VERSION)
    if made_with != aot.VERSION:
        print(
            f"the budget was made with Triton {made_with}, this is {aot.VERSION}: registers and shared "
            "memory are not compared"
        )
    for line in [*wrong, *(better(found, load()) if made_with == aot.VERSION else ())]:
        print(line)
    print(f"{len(found)} launches, {len(wrong)} faults")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
