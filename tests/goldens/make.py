"""Rewrites the stored goldens: `python -m tests.goldens.make [GROUP ...]`.

Groups: schedule, wire, figures, tokens (needs the real model); by default all. Prints what changed. With
`--to FILE` the cases are written there as JSON and the stored file stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tests.goldens import stored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(stored.GROUPS))
    parser.add_argument("--to", type=Path, help="write here and leave the stored file")
    asked = parser.parse_args()
    groups = asked.groups or list(stored.GROUPS)
    if unknown := [g for g in groups if g not in stored.GROUPS]:
        parser.error(f"no group {', '.join(unknown)}: there are {', '.join(stored.GROUPS)}")
    if "tokens" in groups:
        import torch

        torch.set_num_threads(1)
    now = stored.computed(groups)
    if asked.to is not None:
        asked.to.write_text(json.dumps(now), encoding="utf-8")
        return
    before = stored.load() if stored.FILE.exists() else {}
    kept = {n: c for n, c in before.items() if n.split("-", 1)[0] not in groups}
    merged = {**kept, **now}
    for line in stored.differences(before, merged):
        print(line)
    ordered = {n: merged[n] for g in stored.GROUPS for n in merged if n.split("-", 1)[0] == g}
    stored.write(ordered)
    if "wire" in groups:
        stored.write_wire()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
