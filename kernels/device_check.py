"""Checks this machine's GPU: operators, equal tokens, waits, and speed against others and the roof.

Under six minutes, one JSON file.

    python kernels/device_check.py --out check.json             on a machine with a card
    python kernels/device_check.py --out check.json --dry-run   tries the script itself on a CPU, in seconds

All of it is `cbviz.bench.device_check`; this file makes it run from a checkout that is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path = [
        p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent
    ]  # files here are called as others' modules are
    from cbviz.bench.device_check import main

    sys.exit(main())
