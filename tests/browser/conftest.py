"""Servers and a real Chromium for the explorer's tests.

A cache of its own, with the weights linked in, so that runs lie where a test finds them.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from cbviz.app import kept, serve
from cbviz.model import hub
from cbviz.trace import Cursor, Trace, load

ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT_MS = 60_000


@pytest.fixture(scope="session")
def browser_type(chromium: str) -> Iterator[Any]:
    """Playwright's handle, with which the system's Chromium is started."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync.sync_playwright() as p:
        yield functools.partial(
            p.chromium.launch_persistent_context, executable_path=chromium, headless=True, args=ARGS
        )


class Address(str):
    """A server's address; `pid` is its process, whose children are the kernels."""

    pid: int


def wait_for_function(page: Any, expression: str, *, arg: Any = None, timeout: float = WAIT_MS) -> None:
    """Waits from outside until the expression holds: a page's policy forbids the `eval` with which Playwright
    would ask inside it.
    """
    from playwright.sync_api import Error  # not everywhere; the fixture that starts a browser asks first

    end = time.monotonic() + timeout / 1000
    while True:
        try:
            if page.evaluate(expression, arg):
                return
        except Error as e:
            if "Execution context was destroyed" not in str(e):  # the page is being loaded
                raise
        if time.monotonic() > end:
            raise TimeoutError(f"{timeout:.0f} ms have passed and this does not hold: {expression}")
        time.sleep(0.03)


class Tab:
    """A page of its own browser, or with `beside` another tab of that one's, with everything it asked for and
    complained of.
    """

    def __init__(self, launch: Any, *, beside: Tab | None = None, **context: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.beside = beside
        if beside is not None:
            self.context = beside.context
            self.page = self.context.new_page()
        else:
            self.context = launch(
                self._folder.name, **{"viewport": {"width": 1280, "height": 800}, **context}
            )
            self.page = self.context.pages[0] if self.context.pages else self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.wait_for_function = functools.partial(wait_for_function, self.page)
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.forgiven: tuple[
            str, ...
        ] = ()  # parts of complaints that are known and none of ours; a test that fills this says why
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))

    @property
    def strangers(self) -> list[str]:
        """Requests to any other host."""
        return [
            u
            for u in self.asked
            if not u.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))
        ]

    def ready(self, step: int = 0) -> None:
        """Waits for a picture that stands at `step` or later."""
        self.page.wait_for_function(
            f"globalThis.cbviz && cbviz.state() && cbviz.frames() > 0 && cbviz.state().step >= {step}"
        )
        self.page.wait_for_selector(".cb-step:not([disabled]):visible")

    def state(self) -> dict[str, Any]:
        return self.page.evaluate("cbviz.state()")

    def at(self, step: int) -> None:
        self.page.wait_for_function(f"cbviz.state().step === {step}")

    def step(self, to: int) -> None:
        """Presses Step until the page stands at `to`."""
        while (now := self.state()["step"]) < to:
            self.page.click(".cb-step:visible")
            self.page.wait_for_function(f"cbviz.state().step > {now}")

    def notice(self, words: str) -> str:
        """Waits for a notice with these words; returns all notices."""
        self.page.wait_for_function(
            "words => document.querySelector('.cb-notices')?.textContent.includes(words)", arg=words
        )
        return str(self.page.inner_text(".cb-notices"))

    def close(self) -> None:
        if self.beside is None:
            self.context.close()
        self._folder.cleanup()


@pytest.fixture
def open_tab(browser_type: Any) -> Iterator[Callable[..., Tab]]:
    """Opens tabs; at the end no page may have asked another host for anything or complained."""
    tabs: list[Tab] = []

    def make(url: str, **context: Any) -> Tab:
        tab = Tab(browser_type, **context)
        tabs.append(tab)
        tab.page.goto(url, wait_until="commit")
        return tab

    yield make
    strangers, errors = (
        [u for t in tabs for u in t.strangers],
        [e for t in tabs for e in t.errors if not any(f in e for f in t.forgiven)],
    )
    for t in tabs:
        t.close()
    assert strangers == []
    assert errors == []


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for the servers: ours linked in, all but the runs."""
    folder = tmp_path_factory.mktemp("cache")
    for entry in hub.cache_dir().iterdir():
        if entry.name not in ("runs", "pages"):
            (folder / entry.name).symlink_to(entry)
    return folder


@contextmanager
def serving(command: list[str], env: dict[str, str], url: str, log: Path) -> Iterator[int]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent
        )
    try:
        assert serve.wait_until_up(url, process), log.read_text("utf-8", "replace")
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kernels(server: Address) -> set[psutil.Process]:
    """The kernels' processes."""
    found = set()
    for p in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.Error):  # ended while we looked
            if "ipykernel_launcher" in " ".join(p.cmdline()):
                found.add(p)
    return found


def a_port() -> int:
    for _ in range(20):
        try:
            return serve.free_port("127.0.0.1", random.randint(18100, 28000))
        except OSError:
            continue
    raise OSError("no free port")


@pytest.fixture(scope="session")
def voila(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """The address of the explorer under Voilà, as `cbviz explore` serves it, but kernels without a page go
    after 15 seconds.
    """
    folder, port = tmp_path_factory.mktemp("voila"), a_port()
    notebook = folder / "explorer.ipynb"
    shutil.copyfile(serve.notebooks() / "explorer.ipynb", notebook)
    command = serve.explore_command(
        notebook,
        "127.0.0.1",
        port,
        ["--MappingKernelManager.cull_idle_timeout=15", "--MappingKernelManager.cull_interval=1"],
    )
    url = f"http://127.0.0.1:{port}/"
    with serving(
        command, serve.environment(CBVIZ_CACHE=str(cache), CBVIZ_MODEL="sim"), url, folder / "log"
    ) as pid:
        address = Address(url)
        address.pid = pid
        yield address


@contextmanager
def lab_server(root: Path, cache: Path, folder: Path) -> Iterator[Address]:
    """A JupyterLab on `root` without a token; its settings and log lie in `folder`. Yields its address."""
    port = a_port()
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={root}",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    env = serve.environment(
        CBVIZ_CACHE=str(cache),
        JUPYTERLAB_SETTINGS_DIR=str(folder / "settings"),
        JUPYTERLAB_WORKSPACES_DIR=str(folder / "workspaces"),
    )
    url = Address(f"http://127.0.0.1:{port}/")
    with serving(command, env, url, folder / "log") as url.pid:
        yield url


@pytest.fixture(scope="session")
def lab(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """The address of a JupyterLab whose folder holds the explorer's notebook, as `explorer.ipynb` (simulated)
    and `real.ipynb`.
    """
    folder = tmp_path_factory.mktemp("lab")
    root = folder / "root"
    root.mkdir()
    source = (serve.notebooks() / "explorer.ipynb").read_text("utf-8")
    (root / "explorer.ipynb").write_text(
        source.replace("cb.explorer()", "cb.explorer(scenario='preemption', model='sim')"), "utf-8"
    )
    (root / "real.ipynb").write_text(
        source.replace("cb.explorer()", "cb.explorer(scenario='chat', model='smollm2')"), "utf-8"
    )
    with lab_server(root, cache, folder) as url:
        yield url


def newest_run(cache: Path) -> Trace:
    """The trace that was autosaved last: what the session itself wrote."""
    return load(max((cache / "pages").glob("*/*.jsonl"), key=lambda p: p.stat().st_mtime_ns))


def run_of(tab: Tab) -> str:
    """The name of the page's run: its address has it."""
    tab.page.wait_for_function("new URL(location.href).searchParams.has('run')")
    return parse_qs(urlsplit(tab.page.url).query)["run"][0]


def saved_file(cache: Path, run: str) -> Path:
    """The file of the branch that the page of this run shows."""
    folder = cache / "pages" / run
    return kept.branch_path(folder, kept.shown_branch(folder))


def assert_drawn(drawn: dict[str, Any], trace: Trace) -> None:
    """What the page has decoded and drawn equals the state of the session's own trace at the same moment."""
    s = trace.state(Cursor(drawn["step"], drawn["event"]))
    assert drawn["requests"] == {
        r.request_id: {
            "state": r.state,
            "num_computed_tokens": max(0, r.num_computed_tokens),
            "output_tokens": len(r.output_token_ids),
            "blocks": r.block_ids,
            "num_preemptions": r.num_preemptions,
        }
        for r in s.by_index
    }
    blocks = range(s.num_blocks)
    assert drawn["owners"] == [s.by_index[s.owner(b)].request_id if s.ref_count(b) else None for b in blocks]
    assert drawn["refs"] == [s.ref_count(b) for b in blocks]
    assert drawn["fills"] == [s.fill(b) for b in blocks]
    assert drawn["cached"] == [bool(s.cached[b]) and b != 0 for b in blocks]
    assert (drawn["waiting"], drawn["running"]) == (s.waiting, s.running)
