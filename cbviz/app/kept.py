"""Where pages keep their runs, and which kernel may write one. Knows files and names, no session and no page.

A run is a folder of its own in the cache's `pages`, apart from runs of the command line and of Python. Only
this user can read it:

    run.json          the run's name, and a digest of the browser that it was given to
    main.jsonl        the first branch; other branches are b2.jsonl, b3.jsonl, ...
    family.json       which branches there are, and which one the page showed last
    lock              held by the one kernel that writes here; the system drops it when that kernel ends, however it ends
    ask-X, here-X     a second kernel wants this run; the holder answers that its page is still there

A reload and a duplicated tab look alike from here: the same name comes again. What tells them apart is
whether the first page still answers. So the holder asks its page. If the page answers, the second kernel
works on a copy with a name of its own. If it does not, the holder lets go.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cbviz.model import hub
from cbviz.trace.autosave import write_text

MAIN = "main"
"""The file of a run's first branch."""
KEEP_RUNS = 20
KEEP_S = 86400.0
"""Runs younger than this are kept, however many there are."""
_NAME = re.compile(r"[A-Za-z0-9_-]{22}")
_BRANCH = re.compile(r"main|b[0-9]{1,6}")


def pages_dir() -> Path:
    """The folder of all pages' runs, made if absent. Raises OSError or ModelError where it cannot be made."""
    path = hub.cache_dir() / "pages"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def digest(browser: str) -> str:
    """What is written down of a browser's secret; '' where the server hands out none."""
    return hashlib.sha256(f"cbviz browser {browser}".encode()).hexdigest() if browser else ""


@dataclass(eq=False)
class Held:
    """A run that this process may write."""

    name: str
    folder: Path
    lock: FileLock

    def path(self, branch: str) -> Path:
        """The file of a branch."""
        return branch_path(self.folder, branch)

    def new_branch(self) -> str:
        """Claim a free file for another branch and return its name. Raises OSError."""
        n = 2
        while True:
            try:
                self.path(f"b{n}").open("xb").close()
                return f"b{n}"
            except FileExistsError:
                n += 1

    def questions(self) -> list[Path]:
        """The questions of other kernels that were not answered yet."""
        with suppress(OSError):
            return [f for f in self.folder.iterdir() if f.name.startswith("ask-")]
        return []

    def answer_here(self) -> None:
        """Tell all who asked that the page of this run is still there."""
        for question in self.questions():
            with suppress(OSError):
                question.rename(question.with_name(question.name.replace("ask-", "here-", 1)))

    def release(self) -> None:
        """Give up the right to write; the files stay."""
        with suppress(OSError):
            self.lock.release()

    def discard(self) -> None:
        """Remove a run that came to nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()


def branch_path(folder: Path, branch: str) -> Path:
    """The file of a branch of the run in `folder`."""
    return folder / f"{branch}.jsonl"


def family_path(folder: Path) -> Path:
    """The file that says which branches the run in `folder` has."""
    return folder / "family.json"


def family(folder: Path) -> dict[str, Any]:
    """What stands in the run's family file; empty where there is none or it cannot be read.

    No branch in it has a file outside the folder.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        told = json.loads(family_path(folder).read_text("utf-8"))
        if all(_BRANCH.fullmatch(m["run"]) for m in told.get("members", [])):
            return dict(told)
    return {}


def shown_branch(folder: Path) -> str:
    """The branch that the page of this run showed last."""
    branch = family(folder).get("shown", MAIN)
    return (
        branch
        if isinstance(branch, str) and _BRANCH.fullmatch(branch) and branch_path(folder, branch).exists()
        else MAIN
    )


# which run -----------------------------------------------------------------------------------------------


def create(browser: str = "") -> Held:
    """A new run under a name that nobody guesses, with the right to write it.

    Raises OSError or ModelError.
    """
    name = secrets.token_urlsafe(16)
    folder = pages_dir() / name
    folder.mkdir(mode=0o700)
    try:
        write_text(folder / "run.json", json.dumps({"run": name, "browser": digest(browser)}))
        held = grab(folder)
        if held is None:
            raise OSError("the lock of a new run is taken")
        return held
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def find(name: str, browser: str = "") -> Path | None:
    """The folder of a run that was given to this browser.

    None for any other name, without a word about why.
    """
    if not _NAME.fullmatch(name):
        return None
    try:
        folder = pages_dir() / name
        record = json.loads((folder / "run.json").read_text("utf-8"))
    except (OSError, ValueError, hub.ModelError):
        return None
    if not isinstance(record, dict) or record.get("run") != name or record.get("browser") != digest(browser):
        return None
    return folder


def grab(folder: Path) -> Held | None:
    """The right to write the run in `folder`, None while another kernel has it.

    Raises OSError where nothing can be locked.
    """
    lock = FileLock(folder / "lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return Held(folder.name, folder, lock)


def ask(folder: Path) -> str:
    """Ask the kernel that holds the run whether its page is still there.

    Returns the question's id. Raises OSError.
    """
    question = secrets.token_hex(8)
    (folder / f"ask-{question}").touch()
    return question


def answered(folder: Path, question: str) -> bool:
    """Whether the holder said that its page is still there."""
    return (folder / f"here-{question}").exists()


def forget(folder: Path, question: str) -> None:
    """Take a question back, answered or not."""
    for kind in ("ask", "here"):
        with suppress(OSError):
            (folder / f"{kind}-{question}").unlink()


def copy(folder: Path, browser: str = "") -> Held:
    """A new run with the branches of the one in `folder`, up to the last line that is written whole.

    Raises OSError or ModelError.
    """
    held = create(browser)
    try:
        for source in folder.glob("*.jsonl"):
            if _BRANCH.fullmatch(source.stem):
                data = source.read_bytes()
                held.path(source.stem).write_bytes(data[: data.rfind(b"\n") + 1])
        if family_path(folder).exists():
            shutil.copyfile(family_path(folder), family_path(held.folder))
        return held
    except BaseException:
        held.discard()
        raise


def tidy(keep: int = KEEP_RUNS, young_s: float = KEEP_S) -> None:
    """Remove all but the newest runs; none of the last day, and none that a kernel still writes."""
    with suppress(OSError, hub.ModelError):
        runs = sorted(((_last_write(f), f) for f in pages_dir().iterdir() if f.is_dir()), reverse=True)
        for at, folder in runs[keep:]:
            if time.time() - at > young_s and (held := grab(folder)) is not None:
                held.discard()


def _last_write(folder: Path) -> float:
    times = [0.0]
    for f in (folder, *folder.glob("*.json*")):
        with suppress(OSError):
            times.append(f.stat().st_mtime)
    return max(times)
