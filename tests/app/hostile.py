"""A real server, an honest page without a browser, and raw sockets for the rest: what the hostile-client
tests need.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import websocket

from cbviz.app import serve
from cbviz.app.server.sockets import PROTOCOL

TOKEN = "hostile-test-token"
WAIT_S = 60.0


class Server:
    """A server in a process of its own, started as the command line starts it."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, log: Path, host: str = "127.0.0.1"
    ) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.host = host

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def voila(self) -> psutil.Process:
        """The process that answers."""
        return next(
            p
            for p in psutil.Process(self.process.pid).children(recursive=True)
            if "cbviz.app.server" in p.cmdline()
        )

    @property
    def kernels(self) -> int:
        count = 0
        for p in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                count += "ipykernel_launcher" in p.cmdline()
        return count

    def until_kernels(self, most: int) -> None:
        end = time.monotonic() + WAIT_S
        while self.kernels > most:
            assert time.monotonic() < end, f"{self.kernels} kernels are left, {most} should be"
            time.sleep(0.1)

    def get(
        self, path: str = "/", method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of an answer. Headers are named with underscores."""
        c = http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)
        try:
            c.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                c.putheader(name.replace("_", "-"), value)
            if body is not None:
                c.putheader("Content-Length", str(len(body)))
            c.endheaders(body)
            r = c.getresponse()
            answer = {
                **dict(r.getheaders()),
                **({"Set-Cookie": "\n".join(given)} if (given := r.headers.get_all("Set-Cookie")) else {}),
            }
            return r.status, answer, r.read().decode("utf-8", "replace")
        finally:
            c.close()

    def enter(self) -> str:
        """A new browser's cookie."""
        status, headers, _ = self.get(f"/?token={TOKEN}")
        assert status == 302, status
        return headers["Set-Cookie"].partition(";")[0]

    def raw(self, data: bytes, wait_s: float = 5.0) -> bytes:
        """What the server answers to bytes, until it closes or says nothing more."""
        got = b""
        with socket.create_connection((self.host, self.port), timeout=wait_s) as s, suppress(OSError):
            s.sendall(data)
            while part := s.recv(65536):
                got += part
        return got


@contextmanager
def command_line(
    folder: Path, *options: str, port: int | None = None, host: str = "127.0.0.1", token: str = TOKEN
) -> Iterator[Server]:
    """`cbviz explore` with a working folder of its own."""
    port = port or serve.free_port(
        host if host != "0.0.0.0" else "127.0.0.1", 20000 + secrets.randbelow(20000)
    )
    log = folder / "log"
    env = {**os.environ, "CBVIZ_CACHE": str(folder / "cache"), "CBVIZ_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    command = [
        str(Path(sys.executable).with_name("cbviz")),
        "explore",
        "--model",
        "sim",
        "--no-browser",
        "--port",
        str(port),
        *options,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
    server = Server(process, port, log, host)
    try:
        end = time.monotonic() + WAIT_S
        while "Ctrl-C stops it" not in log.read_text("utf-8", "replace"):
            assert process.poll() is None and time.monotonic() < end, log.read_text("utf-8", "replace")
            time.sleep(0.1)
        yield server
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for p in children:
            with suppress(psutil.Error):
                p.kill()


class Page:
    """A page as a browser has it: its cookie, its kernel, and a socket to it."""

    def __init__(self, server: Server, cookie: str | None = None, base: str = "/") -> None:
        self.server = server
        self.base = base
        self.cookie = cookie or server.enter()
        status, headers, text = server.get(f"{base}?scenario=chat", Cookie=self.cookie)
        assert status == 200, text
        self.xsrf = re.search(r"_xsrf=([^;\n]*)", headers["Set-Cookie"])
        config = re.search(
            r'<script id="jupyter-config-data" type="application/json">\s*(\{.*?\})\s*</script>',
            text,
            re.DOTALL,
        )
        assert config is not None
        self.kernel_id = json.loads(config.group(1))["kernelId"]
        self.session = secrets.token_hex(8)
        self.ws = self.open()
        comms = self.ask("comm_info_request", {"target_name": "jupyter.widget"})["comms"]
        self.comms = list(comms)

    def open(
        self,
        subprotocols: tuple[str, ...] = (PROTOCOL,),
        cookie: str | None = None,
        origin: str | None = None,
        host: str | None = None,
    ) -> websocket.WebSocket:
        ws = websocket.create_connection(
            f"ws://{self.server.netloc}{self.base}api/kernels/{self.kernel_id}/channels?session_id={secrets.token_hex(4)}",
            subprotocols=list(subprotocols),
            cookie=self.cookie if cookie is None else cookie,
            timeout=WAIT_S,
            origin=origin or f"http://{self.server.netloc}",
            host=host,
        )
        assert isinstance(ws, websocket.WebSocket)
        return ws

    def message(self, kind: str, content: Any, channel: str = "shell", **header: Any) -> bytes:
        """A message in the v1 format; `content` may be bytes that are no JSON."""
        head = {
            "msg_id": secrets.token_hex(8),
            "msg_type": kind,
            "session": self.session,
            "username": "",
            "date": "",
            "version": "5.3",
            **header,
        }
        parts = [
            json.dumps(head).encode(),
            b"{}",
            b"{}",
            content if isinstance(content, bytes) else json.dumps(content).encode(),
        ]
        return frame(channel.encode(), *parts)

    def ask(self, kind: str, content: Any = None, ws: websocket.WebSocket | None = None) -> dict[str, Any]:
        """The content of the kernel's reply."""
        ws = ws or self.ws
        data = self.message(kind, content or {})
        mine = json.loads(split(data)[1])["msg_id"]
        ws.send_binary(data)
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            got = ws.recv()
            if not isinstance(got, bytes) or not got:
                raise AssertionError(f"the socket was closed: {got!r}")
            parts = split(got)
            if parts[0] == b"shell" and json.loads(parts[2])["msg_id"] == mine:
                return dict(json.loads(parts[4]))
        raise AssertionError("no reply")

    def say(self, content: Any, ws: websocket.WebSocket | None = None) -> None:
        """Sends `content` to each of the kernel's widgets, as the page's script would."""
        for comm in self.comms:
            (ws or self.ws).send_binary(
                self.message("comm_msg", {"comm_id": comm, "data": {"method": "custom", "content": content}})
            )

    def is_served(self) -> None:
        """The kernel answers, and the explorer in it does."""
        assert self.ask("kernel_info_request")["status"] == "ok"
        self.say({"type": "ready"})
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            got = self.ws.recv()
            assert isinstance(got, bytes)
            assert got
            if b'"type": "live"' in got or b'"type":"live"' in got:
                return
        raise AssertionError("the explorer does not answer")

    def leave(self) -> None:
        """As a browser does when the page is closed: a last request, with the token that the page was given,
        and the socket's end.
        """
        assert self.xsrf is not None
        token = self.xsrf.group(1)
        status = self.server.get(
            f"{self.base}voila/api/shutdown/{self.kernel_id}",
            "POST",
            f"_xsrf={token}".encode(),
            Cookie=f"{self.cookie}; _xsrf={token}",
            Origin=f"http://{self.server.netloc}",
            Content_Type="application/x-www-form-urlencoded",
        )[0]
        self.ws.shutdown()
        assert status == 204


def frame(*parts: bytes) -> bytes:
    """The v1 format: how many offsets, the offsets, then the channel and the parts."""
    offsets = [8 * (len(parts) + 2)]
    for p in parts:
        offsets.append(offsets[-1] + len(p))
    return b"".join([len(offsets).to_bytes(8, "little"), *(o.to_bytes(8, "little") for o in offsets), *parts])


def split(data: bytes) -> list[bytes]:
    """Channel and parts of a message in the v1 format."""
    count = int.from_bytes(data[:8], "little")
    offsets = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(1, count + 1)]
    return [data[a:b] for a, b in zip(offsets, offsets[1:])]


def handshake(server: Server, path: str, **headers: str) -> bytes:
    """The bytes of a websocket's first request."""
    given = {
        "Host": server.netloc,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(secrets.token_bytes(16)).decode(),
        "Sec-WebSocket-Protocol": PROTOCOL,
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    return "\r\n".join(
        [f"GET {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items() if v), "", ""]
    ).encode()
