"""Compiles a kernel for a card that is not here, and reads from the machine code what it needs: registers,
spills, shared memory, matrix instructions.

Owns the compile and the reading, for NVIDIA's and AMD's targets; which kernels with which arguments, and what
they may need, is `cbviz.bench.budget`. Triton brings the assembler and the disassembler along; no driver and
no card are asked.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""The most shared memory of one program."""
VERSION = triton.__version__
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Figures(NamedTuple):
    registers: int
    """Of a thread."""
    spills: int
    """Instructions that put registers into memory or take them back."""
    shared_bytes: int
    matrix: int
    """Matrix instructions (HMMA, IMMA, wgmma; MFMA)."""
    wide_loads: int
    """Loads of 16 bytes a thread."""
    long_blocks: bool
    """Block ids are 64 bits wide before they are multiplied."""


def arguments(
    fn: Any, args: tuple[Any, ...], constants: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """Signature, constants and attributes that a launch `fn[grid](*args, **constants)` is compiled with: as
    Triton's own launcher specialises it.
    """
    signature: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    values = dict(zip(fn.arg_names, args))
    values.update(constants)
    for p in fn.params:
        value = values[p.name]
        if p.is_constexpr:
            signature[p.name], fixed[p.name] = "constexpr", value
        elif hasattr(value, "dtype"):
            signature[p.name] = "*" + _TYPES[str(value.dtype)]
            attributes[(p.num,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[p.name] = "fp32"
        elif value == 1 and not p.do_not_specialize:
            signature[p.name], fixed[p.name] = "constexpr", 1
        else:
            signature[p.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not p.do_not_specialize:
                attributes[(p.num,)] = [["tt.divisibility", 16]]
    return signature, fixed, attributes


_TYPES = {
    "torch.float32": "fp32",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float64": "fp64",
    "torch.int64": "i64",
    "torch.int32": "i32",
    "torch.int8": "i8",
    "torch.uint8": "u8",
}


def build(
    fn: Any,
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
    target: str,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Figures:
    """Compiles one launch for `target`. Raises what Triton raises if it does not compile."""
    signature, fixed, attributes = arguments(fn, args, constants)
    goal = TARGETS[target]
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(
        ASTSource(fn=fn, signature=signature, constexprs=fixed, attrs=attributes),
        target=goal,
        options=options,
    )
    registers, spills, matrix, wide = (
        _amd(made.asm["amdgcn"]) if goal.backend == "hip" else _nvidia(made.asm["cubin"])
    )
    return Figures(registers, spills, made.metadata.shared, matrix, wide, _long_blocks(made.asm["ttir"]))


def _nvidia(cubin: bytes) -> tuple[int, int, int, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        used = subprocess.run(
            [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        code = subprocess.run(
            [str(_TOOLS / "nvdisasm"), "-c", str(path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    registers = max(int(n) for n in re.findall(r"REG:(\d+)", used))
    return (
        registers,
        _count(code, r"\b(?:STL|LDL)\b"),
        _count(code, r"\b(?:HMMA|IMMA|HGMMA|QGMMA|UTC\w*MMA)\b"),
        _count(code, r"\b(?:LDG|LDGSTS)\.\S*128"),
    )


def _amd(text: str) -> tuple[int, int, int, int]:
    def field(name: str) -> int:
        return max((int(n) for n in re.findall(rf"\.{name}:\s*(\d+)", text)), default=0)

    return (
        field("vgpr_count"),
        field("vgpr_spill_count"),
        _count(text, r"\bv_mfma\w*"),
        _count(text, r"\b(?:global|buffer)_load_dwordx4\b"),
    )


def _count(text: str, pattern: str) -> int:
    return len(re.findall(pattern, text))


def _long_blocks(ttir: str) -> bool:
    """Is a block stride (`k_b`, `v_b`, `s_b`) only ever used after it was made 64 bits wide?

    It is, if what it is multiplied with is: else a large pool would wrap around.
    """
    uses = [line for line in ttir.splitlines() if re.search(r"%[kvs]_b\b", line) and "tt.func" not in line]
    return all(re.search(r"arith\.extsi %[kvs]_b : i32 to i64", line) for line in uses)
