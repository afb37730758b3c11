"""What the tests of the command line share: calling it, and a cache of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cbviz.cli import main, terminal


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as one JSON value, and nothing but it."""
        return json.loads(self.out)


Call = Callable[..., Result]


@pytest.fixture
def cbviz(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """`cbviz("run", "--runner", "sim")` in this process: exit code, stdout, stderr.

    However slow the machine, no progress is told.
    """
    monkeypatch.setattr(terminal, "BAR_AFTER_S", 3600.0)

    def call(*args: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            main([str(a) for a in args])
        out, err = capsys.readouterr()
        return Result(
            e.value.code if isinstance(e.value.code, int) else 0 if e.value.code is None else 1, out, err
        )

    return call


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CBVIZ_CACHE", str(folder))
    return folder
