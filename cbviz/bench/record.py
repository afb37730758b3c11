"""Records vLLM's own scheduler on random scenarios, in the format that `cbviz conform` replays: proof beyond
anybody's recordings.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

from cbviz.bench.peer import VllmPeer, find_python
from cbviz.bench.scenarios import scenario
from cbviz.config import ConfigError


def record(
    folder: Path,
    count: int,
    seed: int,
    vllm_python: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    speculative: bool = False,
) -> str:
    """Writes `count` recordings, of the scenarios `seed`, `seed` + 1, ..., into `folder`.

    Returns vLLM's version.

    `speculative`: with drafts. A scenario that does not end within the worker's step limit is left out.
    Raises ConfigError where there is no vLLM.
    """
    python = find_python(vllm_python)
    if python is None:
        raise ConfigError("vLLM is not installed here: name a Python that has it with --vllm-python PATH")
    folder.mkdir(parents=True, exist_ok=True)
    tell = progress or (lambda done, total, note: None)
    tell(0, count, "starting vLLM")
    with VllmPeer(python) as peer:
        for n in range(count):
            tell(n, count, "")
            s = scenario(seed + n, speculative)
            played = peer.ask("play", config=s["config"], requests=s["requests"])
            if played["complete"]:
                raw = json.dumps({**s, **played}, separators=(",", ":")).encode()
                (folder / f"{s['name']}.json.gz").write_bytes(gzip.compress(raw, mtime=0))
        return peer.version
