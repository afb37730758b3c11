"""Makes the recordings with the real model: `python -m cbviz.recordings.make [NAME ...]`. Takes a minute on
two cores.
"""

from __future__ import annotations

import sys

from cbviz.recordings import FOLDER, NAMES, check
from cbviz.session import Session
from cbviz.workload import PRESETS


def main(names: list[str]) -> None:
    """Runs each preset to its end and writes it beside this file. Raises ConfigError for another name."""
    for name in names:
        check(name)
    for name in names or NAMES:
        s = Session(name, runner="torch", **PRESETS[name].settings)
        s.run()
        path = s.save(FOLDER / f"{name}.jsonl.gz")
        print(f"{name}: {len(s.trace)} steps, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
