"""`python -m cbviz` is `cbviz`.

Python puts the working folder first on the import path then. It is taken away before anything else is
imported, so that a `random.py` of the user's own, lying there, is never run. A cbviz that lies in the working
folder itself (a checkout) stays on the path, at its end.
"""

import sys


def _drop_working_folder() -> None:
    """Takes the first entry of the path, if it is the working folder; `-P` and `-I` have left it out already."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated or not sys.path:
        return
    first = sys.path.pop(0)
    package = __file__.replace("\\", "/").rpartition("/")[0]
    parent = package.rpartition("/")[0] or "/"
    if first.replace("\\", "/").rstrip("/") == parent.rstrip("/") and first not in sys.path:
        sys.path.append(first)


_drop_working_folder()

from cbviz.cli import main  # noqa: E402  # not before the path is safe

main()
