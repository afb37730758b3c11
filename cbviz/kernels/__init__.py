"""Home of the fast operators, imported as `cbviz.kernels.NAME`.

Owns the path by which they are found: the sources stand in the checkout's top folder `kernels/`, where people
look for them, and inside this package in an installed wheel. That folder has no `__init__.py`: a top-level
package called `kernels` would shadow the one on the package index that transformers probes for by import
name. Knows nothing of what the operators compute.
"""

from __future__ import annotations

from pathlib import Path


def _checkout_folder(package_file: Path) -> Path | None:
    """The folder `kernels/` of the checkout that `package_file` (this module's path) lies in; None in an
    installed copy.
    """
    root = package_file.resolve().parents[2]
    project, folder = root / "pyproject.toml", root / "kernels"
    if project.is_file() and folder.is_dir() and 'name = "cbviz"' in project.read_text(encoding="utf-8"):
        return folder
    return None


if (_folder := _checkout_folder(Path(__file__))) is not None:
    __path__.append(str(_folder))
