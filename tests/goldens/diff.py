"""Shows one case in full: `python -m tests.goldens.diff NAME [PART ...]`.

Prints, as text, what the hashes are made from. Run it in two checkouts and compare the outputs with `diff`. For a
`wire-` case the stored messages are at hand, so it prints how they differ from today's.
"""

from __future__ import annotations

import argparse
import difflib

from tests.goldens import stored
from tests.goldens.canonical import text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="for instance schedule-017")
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all parts")
    asked = parser.parse_args()
    module = stored.group_of(asked.name)
    if module is stored.wire:
        a, b = stored.stored_wire_text().splitlines(), stored.wire_text().splitlines()
        print("\n".join(difflib.unified_diff(a, b, "stored", "now", lineterm="", n=0)) or "no difference")
        return
    parts = module.parts(asked.name)
    if unknown := [p for p in asked.parts if p not in parts]:
        parser.error(f"{asked.name} has no part {', '.join(unknown)}: it has {', '.join(parts)}")
    was = stored.load().get(asked.name, {})
    now = stored.hashes(parts)
    print(f"# {asked.name}: {module.about(asked.name)}")
    for part in asked.parts or parts:
        print(
            f"# {part}: {now[part]}, {'as stored' if was.get(part) == now[part] else f'stored {was.get(part)}'}"
        )
        print(text(parts[part]), end="")


if __name__ == "__main__":
    main()
