"""Compiles `cpu_kernels.c` on first use and loads it.

Owns the compiler's command line and the built library in the cache.

No compiler is required: where there is none, or it fails, `library()` says why and the operators in plain
torch are used. The built file is keyed by source, flags, compiler and processor, written beside and renamed,
and checked by its digest before it is loaded. CBVIZ_COMPILE=0 turns compiling off; CC names another compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cbviz.model import hub

SOURCE = Path(__file__).with_name("cpu_kernels.c")
_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
_TUNES = (("-march=native",), ("-mcpu=native",), ())
"""Tried in turn: x86 and new ARM compilers, older ARM ones, any."""
_TIMEOUT_S = 180


@dataclass(frozen=True)
class Native:
    """`lib` is None where nothing could be compiled.

    `about`: one line for people: what was built, or why not.
    """

    lib: ctypes.CDLL | None
    about: str


@functools.cache
def library() -> Native:
    """The compiled kernels, built at most once on a machine and loaded once a process."""
    if os.environ.get("CBVIZ_COMPILE", "1") == "0":
        return Native(None, "compiling is turned off (CBVIZ_COMPILE=0)")
    if os.name != "posix":
        return Native(None, f"not built on {platform.system()}")
    compiler = find_compiler()
    if compiler is None:
        return Native(None, "no C compiler found (cc, gcc or clang)")
    try:
        path = _built(compiler)
        lib = ctypes.CDLL(str(path))
        for name in ("memory", "fits", "forward", "choose", "quiet", "marks"):
            getattr(lib, f"cbviz_{name}").restype = ctypes.c_int64
        lib.cbviz_features.restype = ctypes.c_char_p
    except (OSError, AttributeError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", None)
        return Native(
            None,
            (
                f"{compiler} could not build the kernels: "
                f"{(said.strip().splitlines() or [str(e)])[0] if isinstance(said, str) else e}"
            ),
        )
    return Native(lib, f"compiled by {Path(compiler).name} for {lib.cbviz_features().decode()}")


def find_compiler() -> str | None:
    """The C compiler: CC where it is set, else the first of cc, gcc, clang."""
    named = os.environ.get("CC")
    return next(filter(None, map(shutil.which, [named] if named else ["cc", "gcc", "clang"])), None)


def _built(compiler: str) -> Path:
    """The shared library's path; compiled if it is not there or not what was written.

    Raises OSError or SubprocessError.
    """
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    ).stdout.splitlines()[:1]
    key = hashlib.sha256(
        repr((SOURCE.read_bytes(), _FLAGS, _TUNES, version, platform.machine(), _processor())).encode()
    ).hexdigest()[:24]
    kept = hub.cache_path() / "kernels" / f"cpu-{key}.so"
    if _intact(kept, kept.with_suffix(".sha256")):
        return kept
    folder = hub.writable("kernels")
    path, seal = folder / kept.name, folder / f"cpu-{key}.sha256"
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as scratch:
        made = Path(scratch) / path.name
        for last, tune in enumerate(_TUNES, 1):
            done = subprocess.run(
                [compiler, *_FLAGS, *tune, "-o", str(made), str(SOURCE), "-lm"],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            if done.returncode == 0:
                break
            if last == len(_TUNES):
                done.check_returncode()
        (Path(scratch) / seal.name).write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        os.replace(made, path)
        os.replace(Path(scratch) / seal.name, seal)
    return path


def _intact(path: Path, seal: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == seal.read_text().strip()
    except OSError:
        return False


def _processor() -> str:
    """What tells processors apart that understand different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    )
