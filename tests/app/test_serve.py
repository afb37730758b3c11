"""How the servers are started: options and their mistakes, addresses that are told, a neutral folder, IPv6,
and a proxy with a path.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tornado import httpclient, httpserver, netutil, web, websocket
from tornado.ioloop import IOLoop
from typer.testing import CliRunner

from cbviz.app import serve
from cbviz.app.server.sockets import PROTOCOL
from cbviz.cli import app
from cbviz.config import ConfigError
from tests.app.hostile import TOKEN, Page, Server, command_line


def told(*options: str, **env: str) -> tuple[int, str]:
    """Exit status and error of `cbviz explore` with options that it must refuse."""
    result = CliRunner().invoke(app, ["explore", "--no-browser", "--model", "sim", *options], env=env)
    return result.exit_code, result.stderr.strip()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "no.such.host.invalid"), "--host"),
        (("--host", "256.1.1.1"), "--host"),
        (("--host", "192.0.2.7"), "--host"),
        (("--host", "a b"), "--host"),
        (("--base-url", "class"), "--base-url"),
        (("--base-url", "ftp://uni.example/"), "--base-url"),
        (("--base-url", "http:///x"), "--base-url"),
        (("--base-url", "/a/../b"), "--base-url"),
        (("--base-url", "/a?b=1"), "--base-url"),
        (("--base-url", "https://u:p@uni.example/"), "--base-url"),
        (("--base-url", "http://uni.example:99999/"), "--base-url"),
        (("--base-url", "/ü/"), "--base-url"),
        (("--base-url", ""), "--base-url"),
        (("--token", "short"), "--token"),
        (("--token", "with spaces in it"), "--token"),
        (("--token", "abcdefgh", "--no-token"), "--no-token"),
        (("--no-token", "--allow-code"), "--no-token"),
        (("--no-token", "--host", "0.0.0.0"), "--no-token"),
        (("--no-token", "--host", "::"), "--no-token"),
        (("--no-token", "--base-url", "https://uni.example/"), "--no-token"),
        (("--max-pages", "0"), "--max-pages"),
        (("--max-pages", "-3"), "--max-pages"),
    ],
)
def test_a_wrong_option_is_said_in_one_line_that_names_it(options: tuple[str, ...], named: str) -> None:
    status, error = told(*options, CBVIZ_TOKEN="")
    assert status == 2
    assert len(error.splitlines()) == 1, error
    assert named in error


def test_a_port_that_is_taken_is_said_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, error = told("--port", str(other.getsockname()[1]))
    assert status == 2
    assert "--port" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "split"),
    [
        ("/", ("", "/")),
        ("/class", ("", "/class/")),
        ("/a/b/", ("", "/a/b/")),
        ("https://Uni.example", ("https://uni.example", "/")),
        ("http://localhost:9000/x/", ("http://localhost:9000", "/x/")),
        ("http://[::1]:9000/", ("http://[::1]:9000", "/")),
    ],
)
def test_a_base_url_is_a_path_or_an_address(given: str, split: tuple[str, str]) -> None:
    assert serve.split_base_url(given) == split


def test_a_network_server_says_that_others_can_reach_it_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "network_addresses", lambda v6: [*(["fd00::7"] if v6 else []), "10.0.0.7"])
    alone = serve.Announcement("The explorer", "127.0.0.1", 8866, "/?token=x").lines
    assert alone == ["The explorer is at http://127.0.0.1:8866/?token=x   (Ctrl-C stops it)"]
    four = serve.Announcement("The explorer", "0.0.0.0", 8866, "/?token=x").lines
    assert "http://127.0.0.1:8866/?token=x" in four[0]
    assert "network can reach it" in four[1]
    assert four[2:] == ["  For others: http://10.0.0.7:8866/?token=x"]
    six = serve.Announcement("The explorer", "::", 8866, "/?token=x").lines
    assert "http://[::1]:8866/?token=x" in six[0]
    assert six[2:] == [
        "  For others: http://[fd00::7]:8866/?token=x",
        "  For others: http://10.0.0.7:8866/?token=x",
    ]
    behind = serve.Announcement(
        "The explorer", "127.0.0.1", 8866, "/class/?token=x", "https://uni.example"
    ).lines
    assert behind[0].startswith("The explorer is at https://uni.example/class/?token=x ")


def test_relative_paths_mean_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server starts in a folder of its own, so what the user named here must be absolute by then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "sim").mkdir()
    assert serve.resolved("mine.jsonl") == str(tmp_path / "mine.jsonl")
    assert serve.resolved("./model") == serve.resolved("model") == str(tmp_path / "model")
    assert [serve.resolved(n) for n in ("sim", "chat", "org/name", "", None)] == [
        "sim",
        "chat",
        "org/name",
        "",
        None,
    ]
    monkeypatch.setenv("CBVIZ_CACHE", "cache")
    monkeypatch.setenv("PYTHONPATH", ":lib:")
    monkeypatch.setenv("CBVIZ_TOKEN", "secret-token")
    env = serve.environment()
    assert env["CBVIZ_CACHE"] == str(tmp_path / "cache")
    assert env["PYTHONPATH"] == str(tmp_path / "lib")
    assert "CBVIZ_TOKEN" not in env


def test_the_token_is_in_no_command() -> None:
    """All users of a machine can read the commands that run on it."""
    command = serve.explore_command(Path("/explorer.ipynb"), "127.0.0.1", 8866)
    assert not any("token" in part for part in command)
    assert str(Path.cwd()) not in [part.partition("=")[2] for part in command]


def test_a_token_of_ones_own_must_be_hard_to_guess() -> None:
    assert serve.check_token("class-of-2026") == "class-of-2026"
    with pytest.raises(ConfigError, match="8 to 200"):
        serve.check_token("1234567")


@pytest.mark.xdist_group("heavy")
def test_an_ipv6_server_answers_on_both_kinds_of_address(tmp_path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with command_line(tmp_path, "--host", "::", host="::1") as server:
        log = server.log.read_text("utf-8")
        assert f"http://[::1]:{server.port}/?token=" in log
        assert "network can reach it" in log
        assert server.get(f"/?token={TOKEN}")[0] == 302
        four = Server(server.process, server.port, server.log, "127.0.0.1")
        assert four.get(f"/?token={TOKEN}")[0] == 302
        assert four.get(f"/?token={TOKEN}", Host=f"evil.example:{server.port}")[0] == 403
        assert four.get("/")[0] == 403


# behind a proxy ---------------------------------------------------------------------------------------------


class _Forward(web.RequestHandler):
    """Sends a request on, as a reverse proxy does; without the path below which it shows the server, if
    `strip`.
    """

    def initialize(self, to: str, strip: str) -> None:
        self.to, self.strip = to, strip

    async def _forward(self) -> None:
        uri = self.request.uri or "/"
        uri = "/" + uri.removeprefix(self.strip) if self.strip else uri
        answer = await httpclient.AsyncHTTPClient().fetch(
            httpclient.HTTPRequest(
                self.to + uri,
                method=self.request.method or "GET",
                headers=self.request.headers,
                body=self.request.body or (b"" if self.request.method == "POST" else None),
                follow_redirects=False,
                decompress_response=False,
                request_timeout=60,
            ),
            raise_error=False,
        )
        self.set_status(answer.code)
        for name, value in answer.headers.get_all():
            if name not in ("Content-Length", "Transfer-Encoding", "Connection"):
                self.add_header(name, value)
        if answer.code not in (204, 304):
            self.write(answer.body or b"")

    get = post = delete = _forward  # type: ignore[assignment]

    def check_xsrf_cookie(self) -> None:
        """The server behind does that."""


class _ForwardSocket(websocket.WebSocketHandler):
    """Sends a websocket's messages on in both directions."""

    def initialize(self, to: str, strip: str) -> None:
        self.to, self.strip = to, strip

    def check_origin(self, origin: str) -> bool:
        return True

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        return subprotocols[0] if subprotocols else None

    async def open(self, *args: Any) -> None:  # type: ignore[override]
        uri = self.request.uri or "/"
        uri = "/" + uri.removeprefix(self.strip) if self.strip else uri
        headers = {k: v for k, v in self.request.headers.items() if k in ("Host", "Origin", "Cookie")}
        self.behind = await websocket.websocket_connect(
            httpclient.HTTPRequest(self.to.replace("http", "ws", 1) + uri, headers=headers),
            subprotocols=[PROTOCOL],
            on_message_callback=lambda m: (
                self.write_message(m, binary=True) if m is not None else self.close()
            ),
        )

    async def on_message(self, message: str | bytes) -> None:
        await self.behind.write_message(message, binary=isinstance(message, bytes))

    def on_close(self) -> None:
        if hasattr(self, "behind"):
            self.behind.close()


@contextmanager
def proxy(to: str, strip: str = "") -> Iterator[int]:
    """A reverse proxy on a port of its own, in a thread of its own."""
    begun = threading.Event()
    found: dict[str, Any] = {}

    def run() -> None:
        async def main() -> None:
            sockets = netutil.bind_sockets(0, "127.0.0.1")
            given = {"to": to, "strip": strip}
            server = httpserver.HTTPServer(
                web.Application([(r".*/channels", _ForwardSocket, given), (r".*", _Forward, given)])
            )
            server.add_sockets(sockets)
            found.update(port=sockets[0].getsockname()[1], loop=IOLoop.current(), end=asyncio.Event())
            begun.set()
            await found["end"].wait()
            server.stop()
            await server.close_all_connections()

        asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait(20)
    try:
        yield found["port"]
    finally:
        found["loop"].add_callback(found["end"].set)
        thread.join(20)


@pytest.mark.xdist_group("heavy")
@pytest.mark.parametrize(
    "strips", [False, True], ids=["the proxy passes the path on", "the proxy takes the path away"]
)
def test_a_page_works_below_a_proxys_path_and_leaves_no_kernel(tmp_path: Path, strips: bool) -> None:
    """The link, the redirect, the cookie's path, the page's own addresses, the socket, and the last request
    of a page that is left.
    """
    port = serve.free_port("127.0.0.1", None)
    with (
        proxy(f"http://127.0.0.1:{port}", "/class/" if strips else "") as public,
        command_line(tmp_path, "--base-url", f"http://localhost:{public}/class/", port=port) as server,
    ):
        link = f"http://localhost:{public}/class/?token={TOKEN}"
        assert link in server.log.read_text("utf-8")
        outside = Server(server.process, public, server.log, "localhost")
        status, headers, _ = outside.get(f"/class/?token={TOKEN}&scenario=burst")
        assert (status, headers["Location"]) == (302, "/class/?scenario=burst")
        assert "Path=/class/" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].partition(";")[0]
        for _ in range(2):  # a reload: the page is left and opened again
            page = Page(outside, cookie, "/class/")
            page.is_served()
            assert server.kernels == 1
            page.leave()
            server.until_kernels(0)
        assert outside.get("/class/", Cookie=cookie, Origin="http://evil.example")[0] == 403
        assert outside.get("/class/")[0] == 403
