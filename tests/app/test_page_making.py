"""A page's kernel lives while the page is being made, however long that takes, and no longer than its page."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
import psutil
import pytest

from cbviz.app import serve
from cbviz.app.server import kernels
from tests.app.hostile import WAIT_S, Server

pytestmark = [pytest.mark.xdist_group("heavy"), pytest.mark.timeout(240)]
IDLE_S = 1
"""After so long without a page a kernel goes; the notebook below takes several times as long."""


@contextmanager
def serving(folder: Path, code: str, kernel: str = "python3", *options: str) -> Iterator[Server]:
    """A server on a notebook of one cell."""
    notebook = folder / "page.ipynb"
    spec = {"name": kernel, "display_name": kernel, "language": "python"}
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)], metadata={"kernelspec": spec}),
        notebook,
    )
    port = serve.free_port("127.0.0.1", 20000 + secrets.randbelow(20000))
    command = serve.explore_command(notebook, "127.0.0.1", port, options)
    log = folder / "log"
    env = serve.environment()
    env["JUPYTER_PATH"] += os.pathsep + str(folder)
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
    try:
        assert serve.wait_until_up(f"http://127.0.0.1:{port}/", process), log.read_text("utf-8", "replace")
        yield Server(process, port, log)
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for p in children:
            with suppress(psutil.Error):
                p.kill()
        if process.poll() is None:
            process.kill()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a notebook that takes much longer than a kernel may be without a page."""
    code = f"import time\ntime.sleep({6 * IDLE_S})\nprint('ran', 'to', 'its', 'end')"
    options = [f"--MappingKernelManager.cull_idle_timeout={IDLE_S}", "--MappingKernelManager.cull_interval=1"]
    with serving(tmp_path_factory.mktemp("slow"), code, "python3", *options) as server:
        yield server


def test_a_page_that_takes_longer_than_a_kernel_may_be_idle_is_made_whole(slow: Server) -> None:
    # given / when: the page is asked for, and no socket can be open before it is there
    status, _, text = slow.get("/")
    # then
    assert status == 200
    assert "ran to its end" in text, slow.log.read_text("utf-8", "replace")
    # and a page that never opens its socket gives its kernel back
    slow.until_kernels(0)


def test_a_visitor_who_leaves_while_the_page_is_made_takes_the_kernel_along(slow: Server) -> None:
    # given
    with socket.create_connection((slow.host, slow.port), timeout=WAIT_S) as s:
        s.sendall(f"GET / HTTP/1.1\r\nHost: {slow.netloc}\r\n\r\n".encode())
        end = time.monotonic() + WAIT_S
        while slow.kernels == 0:
            assert time.monotonic() < end, "no kernel was started"
            time.sleep(0.05)
    # when the connection is closed, then
    slow.until_kernels(0)
    assert slow.process.poll() is None


def test_a_page_whose_kernel_dies_at_its_start_says_so_and_ends(tmp_path: Path) -> None:
    # given a kernel that ends before it has answered
    folder = tmp_path / "kernels" / "ends"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-c", "import time; time.sleep(0.5)"]
    (folder / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "ends", "language": "python"})
    )
    with serving(tmp_path, "1", "ends") as server:
        # when
        status, _, text = server.get("/")
        # then the answer comes to its end, and says what to do
        assert status == 200
        assert "kernel behind this page ended" in text
        assert "Reload" in text


def test_a_kernel_that_is_still_starting_is_not_taken_for_one_without_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given a kernel in the list whose start has not returned
    ended, now = [], [1000.0]
    monkeypatch.setattr(kernels.time, "monotonic", lambda: now[0])
    manager = kernels.PageKernels(cull_idle_timeout=15)

    async def give_back(kernel_id: str) -> None:
        ended.append(kernel_id)

    monkeypatch.setattr(manager, "give_back", give_back)
    # when the manager looks for idle kernels
    asyncio.run(manager.cull_kernel_if_idle("starting"))
    # then
    assert ended == []
    # and one whose page never comes goes after its time
    now[0] += 16
    asyncio.run(manager.cull_kernel_if_idle("starting"))
    assert ended == ["starting"]
