"""A cache that can't be made or written: every command goes on without it and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cbviz.app import kept
from cbviz.app.opening import Settings, controls
from cbviz.cost import calibrate
from cbviz.model import hub, loader, native
from cbviz.trace import load, runs


@pytest.fixture(params=["cannot be made", "cannot be written"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path below a file, or a folder in which files stand where its folders belong (rights don't hold back
    an administrator).
    """
    if request.param == "cannot be made":
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "cache"
    else:
        folder = tmp_path / "cache"
        folder.mkdir()
        for name in (*hub.FOLDERS, calibrate.FILE):
            (folder / name).mkdir() if name == calibrate.FILE else (folder / name).write_text("")
    monkeypatch.setenv("CBVIZ_CACHE", str(folder))
    monkeypatch.setattr(hub, "_own_folder", lambda: tmp_path)
    return folder


def command(*args: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "cbviz", *args], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == status, done.stderr
    return done


def test_run_goes_on_and_says_that_nothing_is_kept(cache: Path) -> None:
    # when
    done = command("run", "--runner", "sim", "--workload", "chat")
    # then
    assert "trace: not kept" in done.stdout
    assert "this run is not kept" in done.stderr
    assert "--out" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_as_json_names_no_file_that_is_not_there(cache: Path) -> None:
    done = command("run", "--runner", "sim", "--workload", "chat", "--json")
    assert json.loads(done.stdout)["trace"] is None


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_run_with_a_named_file_needs_no_cache(cache: Path, tmp_path: Path, name: str) -> None:
    done = command("run", "--runner", "sim", "--workload", "chat", "--out", str(tmp_path / name))
    assert "not kept" not in done.stdout + done.stderr
    assert len(load(tmp_path / name)) > 0


def test_show_without_a_name_says_that_no_run_is_kept(cache: Path) -> None:
    assert "no run is kept" in command("show", status=2).stderr


def test_doctor_reports_it_as_a_finding(cache: Path) -> None:
    report = json.loads(command("doctor", "--json").stdout)
    finding = next(f for f in report["findings"] if f["name"] == "cache")
    assert report["works"]["simulator"]
    assert not any("could not be examined" in f["found"] for f in report["findings"])
    assert finding["status"] == "limited" and "CBVIZ_CACHE" in finding["advice"]


def test_a_measurement_that_cannot_be_kept_is_still_told(cache: Path) -> None:
    assert "could not be kept" in command("calibrate").stdout


def test_the_explorers_settings_can_be_shown(cache: Path) -> None:
    assert any(row["name"] == "model" for row in controls(Settings("chat", "sim"), None))
    with pytest.raises((OSError, hub.ModelError)):
        kept.create()  # the page catches these, and says that the run is not saved
    assert kept.find("x" * 22) is None
    assert runs.recent() == []
    kept.tidy()


def test_a_model_that_ships_with_the_package_loads_all_the_same(cache: Path, tmp_path: Path) -> None:
    # when
    model = loader.load(next(iter(hub.SHIPPED)))
    # then its converted copy lies in this process's own folder, and is used again
    assert model.folder is not None and model.folder.is_relative_to(tmp_path / "converted")
    assert loader.load(next(iter(hub.SHIPPED))).folder == model.folder
    assert model.weights_in("fast") is not None


def test_a_kept_copy_is_used_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a cache with a converted copy and a compiled library, that can be read alone
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))
    before = loader.load(next(iter(hub.SHIPPED))).folder
    compiler = native.find_compiler()
    library = native._built(compiler) if compiler is not None else None
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(hub, "_own_folder", lambda: own)
    monkeypatch.setattr(hub.tempfile, "TemporaryFile", _no_rights)
    # when / then
    again = loader.load(next(iter(hub.SHIPPED)))
    assert again.folder == before
    assert again.weights_in("fast") is not None  # made of it, elsewhere
    assert list((own / "converted").glob("*/weights-fast.safetensors"))
    if compiler is not None:
        assert native._built(compiler) == library


@pytest.mark.skipif(os.name != "posix" or native.find_compiler() is None, reason="nothing is compiled here")
def test_kernels_are_compiled_where_they_cannot_be_kept(cache: Path, tmp_path: Path) -> None:
    compiler = native.find_compiler()
    assert compiler is not None
    path = native._built(compiler)
    assert path.parent == tmp_path / "kernels"
    assert native._built(compiler) == path


def _no_rights(**given: object) -> object:
    raise PermissionError(13, "Permission denied")
