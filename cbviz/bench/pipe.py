"""The loop of a worker behind pipes: one JSON object a line in, one on the real stdout for each.

Imports nothing but the standard library.

Workers run by a Python that need not have cbviz load this file by its path, beside their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answers until the input ends.

    Whatever else is printed goes to stderr: it must not end up between the answers. An exception is answered
    with {"error": text}.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except Exception as e:
            said = {"error": f"{type(e).__name__}: {e}"}
        out.write(json.dumps(said) + "\n")
        out.flush()
