"""`python -m cbviz` runs no file of the working folder, though Python puts that folder first on the import
path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cbviz

ROOT = Path(cbviz.__file__).parent.parent


def run(folder: Path, *args: str, path: str | None = str(ROOT)) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    if path is not None:
        env["PYTHONPATH"] = path
    return subprocess.run(
        [sys.executable, "-m", "cbviz", *args],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", ["random", "json", "typing", "typer", "msgspec", "numpy", "voila"])
def test_no_module_of_the_working_folder_is_run(tmp_path: Path, name: str) -> None:
    # given (Python itself imports a few modules before any of ours, such as functools and types: those nobody
    # can save)
    (tmp_path / f"{name}.py").write_text(
        f"open('ran', 'w').write({name!r})\nraise SystemExit('a file of the working folder ran')\n"
    )
    # when
    done = run(tmp_path, "run", "--runner", "sim", "--workload", "chat", "--out", "run.jsonl")
    # then
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_checkout_in_the_working_folder_is_still_found() -> None:
    done = run(ROOT, "--version", path=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"cbviz {cbviz.__version__}"
