"""Memory of kernels that serve the model: resident, and what each has to itself, one kernel and several at
once on one machine.

Each kernel is a process of its own with a session on the real model, as the explorer's are. Linux alone tells
shared pages apart: `private` are the pages that nobody else maps (USS), `share` counts each page by its
number of users (PSS), so that the shares of all kernels add up to what they take together. The weights are a
read-only mapping of one file: their pages are the same in all kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import psutil

from cbviz.bench.peer import Worker
from cbviz.bench.pipe import serve
from cbviz.config import ConfigError

MOST_BYTES = 900e6
"""What one kernel may take in fast mode with 512 blocks."""


def serve_kernel() -> None:
    """A kernel: loads, runs some steps, tells its memory."""
    session: Any = None

    def answer(m: dict[str, Any]) -> dict[str, Any]:
        nonlocal session
        if m["op"] == "open":
            from cbviz.session import Session

            session = Session(
                "article",
                runner="torch",
                model=m["model"],
                precision=m["precision"],
                num_blocks=m["num_blocks"],
            )
            session.step(m["steps"])
            return {"steps": len(session.trace)}
        if m["op"] == "memory":
            return memory_of(psutil.Process())
        return {"error": f"unknown op {m['op']!r}"}

    serve(answer)


def memory_of(process: psutil.Process) -> dict[str, float]:
    """Resident bytes, and where the system tells them private bytes and the share."""
    full = process.memory_full_info()
    return {
        "resident": float(full.rss),
        **({"private": float(full.uss)} if hasattr(full, "uss") else {}),
        **({"share": float(full.pss)} if hasattr(full, "pss") else {}),
    }


def run(
    model: str = "smollm2",
    precision: str = "fast",
    *,
    num_blocks: int = 512,
    kernels: int = 3,
    steps: int = 20,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """One kernel, then more beside it until there are `kernels`, as plain data.

    Raises ConfigError if a kernel fails.
    """
    if kernels < 1:
        raise ConfigError(f"kernels is {kernels}, the least is 1")
    tell = progress or (lambda done, total, note: None)
    workers: list[Worker] = []
    rows: list[dict[str, Any]] = []
    try:
        for n in range(kernels):
            tell(n, kernels, f"kernel {n + 1} of {kernels}")
            w = Worker(sys.executable, "-m", "cbviz.bench.memory")
            workers.append(w)
            w.ask("open", model=model, precision=precision, num_blocks=num_blocks, steps=steps)
            if n in (0, kernels - 1):
                rows.append({"kernels": n + 1, "each": [x.ask("memory") for x in workers]})
    finally:
        for w in workers:
            w.close()
    return {
        "model": model,
        "precision": precision,
        "num_blocks": num_blocks,
        "steps": steps,
        "most_bytes": MOST_BYTES,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        (
            f"{result['model']}, {result['precision']}, {result['num_blocks']} blocks, after "
            f"{result['steps']} "
            "steps; MB a kernel, measured here"
        )
    ]
    for r in result["rows"]:
        lines.append(f"{r['kernels']} kernel{'s at once' if r['kernels'] > 1 else ''}:")
        for m in r["each"]:
            lines.append("  " + ", ".join(f"{k} {v / 1e6:,.0f}" for k, v in m.items()))
        if all("share" in m for m in r["each"]):
            lines.append(f"  together {sum(m['share'] for m in r['each']) / 1e6:,.0f}")
    first = result["rows"][0]["each"][0]["resident"]
    lines.append(
        f"one kernel takes {first / 1e6:,.0f} MB, at most {result['most_bytes'] / 1e6:,.0f}: "
        f"{'reached' if first <= result['most_bytes'] else 'MISSED'}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    serve_kernel()

__all__ = ["MOST_BYTES", "memory_of", "run", "table"]
