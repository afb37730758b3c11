"""The stored file: for each case a hash of each part and a line about what it is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.goldens import figures, schedules, tokens, wire
from tests.goldens.canonical import short_hash, text

FOLDER = Path(__file__).parent
FILE = FOLDER / "stored.json"
WIRE_FILE = FOLDER / "wire.txt.gz"
"""The wire messages in full: a difference can be printed without an older checkout."""
GROUPS: dict[str, ModuleType] = {
    "schedule": schedules,
    "wire": wire,
    "figures": figures,
    "tokens": tokens,
}
"""Name of a group -> its module, which has `names()`, `parts(name)` and `about(name)`."""
WITHOUT_MODEL = ("schedule", "wire", "figures")

Case = dict[str, str]
"""`about`, and each part's hash."""


def group_of(name: str) -> ModuleType:
    """The module of a case. Raises SystemExit naming the groups."""
    module = GROUPS.get(name.split("-", 1)[0])
    if module is None or name not in module.names():
        raise SystemExit(
            f"no case {name!r}: a case is one of {', '.join(GROUPS)} and a name, see {FILE.name}"
        )
    return module


def computed(groups: Iterable[str]) -> dict[str, Case]:
    """All cases of these groups, computed now."""
    return {
        name: {"about": GROUPS[g].about(name)} | hashes(GROUPS[g].parts(name))
        for g in groups
        for name in GROUPS[g].names()
    }


def hashes(parts: dict[str, Any]) -> Case:
    """A short hash of each part."""
    return {part: short_hash(value) for part, value in parts.items()}


def load() -> dict[str, Case]:
    """What is stored."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def write(cases: dict[str, Case]) -> None:
    """A line a case, so that version control shows which ones changed."""
    lines = [f"{json.dumps(n)}: {json.dumps(c, ensure_ascii=False)}" for n, c in cases.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def wire_text() -> str:
    """The whole scripted session as text."""
    return text(wire.session())


def write_wire() -> None:
    WIRE_FILE.write_bytes(gzip.compress(wire_text().encode(), 9, mtime=0))


def stored_wire_text() -> str:
    return gzip.decompress(WIRE_FILE.read_bytes()).decode()


def differences(stored: dict[str, Case], now: dict[str, Case]) -> list[str]:
    """A line for each case that changed: its parts that did, what it is, and the command that shows more."""
    lines = []
    for name in sorted(stored.keys() | now.keys()):
        a, b = stored.get(name, {}), now.get(name, {})
        changed = [k for k in sorted(a.keys() | b.keys()) if k != "about" and a.get(k) != b.get(k)]
        if changed:
            about = (b or a).get("about", "")
            lines.append(f"{name}: {', '.join(changed)} ({about}); python -m tests.goldens.diff {name}")
    return lines
