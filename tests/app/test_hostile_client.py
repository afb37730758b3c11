"""Clients that mean harm, against one real server: each costs at most its own connection, and an honest page
goes on being served.

Everything happens over the network, as a stranger could do it; nothing of the server is replaced.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import websocket

from tests.app.hostile import TOKEN, Page, Server, command_line, frame, handshake

pytestmark = [pytest.mark.xdist_group("heavy"), pytest.mark.timeout(240)]
MAX_PAGES = 3
MB = 10**6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`cbviz explore` with room for three pages, in a folder whose `random.py` and `voila.py` must never run."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("random.py", "voila.py", "json.py", "torch.py", "cbviz.py", "ipykernel.py"):
        (folder / name).write_text(
            f"open({str(folder / 'ran')!r}, 'a').write({name!r})\nraise SystemExit('a file of the working "
            "folder ran')\n"
        )
    with command_line(folder, "--max-pages", str(MAX_PAGES)) as s:
        yield s


@pytest.fixture(scope="module")
def honest(server: Server) -> Iterator[Page]:
    """A page that is open during all of the attacks."""
    page = Page(server)
    yield page
    page.leave()


@pytest.fixture(scope="module")
def hostile(server: Server, honest: Page) -> Iterator[Page]:
    """A page whose owner has the link, but attacks: it has a browser and a kernel of its own."""
    page = Page(server)
    yield page
    page.leave()


@pytest.fixture(autouse=True)
def _the_honest_page_is_served(server: Server, honest: Page) -> Iterator[None]:
    """After each attack: the server's process lives, has not grown much, and the honest page gets its
    answers.
    """
    before = server.voila.memory_info().rss
    yield
    assert server.process.poll() is None
    honest.is_served()
    grown = server.voila.memory_info().rss - before
    assert grown < 80 * MB, f"the server took {grown / MB:.0f} MB more"


def ended(ws: websocket.WebSocket) -> bool:
    """Whether the server closes the socket (other messages of the kernel may come first)."""
    ws.settimeout(20)
    end = time.monotonic() + 20
    try:
        while time.monotonic() < end:
            opcode, _ = ws.recv_data()
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                return True
        return False
    except (websocket.WebSocketConnectionClosedException, ConnectionError):
        return True
    finally:
        ws.shutdown()


# who may ask ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:{port}"},
        {"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"},
        {"Host": "127.0.0.1.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
    ],
)
def test_another_site_gets_nothing_from_any_route(
    server: Server, honest: Page, headers: dict[str, str]
) -> None:
    """With the cookie and the token too: that is what a rebound name or a forged request would come with."""
    given = {k: v.format(port=server.port) for k, v in headers.items()}
    kernels = server.kernels
    for path in (
        "/",
        f"/?token={TOKEN}",
        "/voila/static/voila.js",
        "/voila/templates/cbviz/static/voila-style.js",
        "/voila/api/contents/",
        f"/api/kernels/{honest.kernel_id}",
        "/voila/files/x.png",
        "/login",
        "/favicon.ico",
    ):
        assert server.get(path, Cookie=honest.cookie, **given)[0] == 403, path
    assert (
        server.get(f"/voila/api/shutdown/{honest.kernel_id}", "POST", b"", Cookie=honest.cookie, **given)[0]
        == 403
    )
    assert server.get(f"/api/kernels/{honest.kernel_id}", "DELETE", Cookie=honest.cookie, **given)[0] == 403
    path = f"/api/kernels/{honest.kernel_id}/channels"
    assert b" 403 " in server.raw(handshake(server, path, Cookie=honest.cookie, **given), 1.0)[:40]
    assert server.kernels == kernels


def test_without_token_or_with_a_wrong_one_no_route_answers(server: Server, honest: Page) -> None:
    for path in (
        "/",
        "/?token=",
        "/?token=wrong",
        "/voila/static/voila.js",
        f"/api/kernels/{honest.kernel_id}",
        f"/api/kernels/{honest.kernel_id}/channels",
        "/login",
    ):
        status, headers, text = server.get(path)
        assert status == 403, path
        assert "Set-Cookie" not in headers
        assert TOKEN not in text
        assert "cbviz explore" in text  # and the visitor learns what to do
    assert b" 403 " in server.raw(handshake(server, f"/api/kernels/{honest.kernel_id}/channels"), 1.0)[:40]


def test_one_browser_cannot_reach_the_kernel_of_another(server: Server, honest: Page) -> None:
    other = server.enter()
    assert server.get(f"/api/kernels/{honest.kernel_id}", Cookie=other)[0] == 404
    assert server.get(f"/voila/api/shutdown/{honest.kernel_id}", "POST", b"", Cookie=other)[0] == 404
    with pytest.raises(websocket.WebSocketBadStatusException):
        honest.open(cookie=other)


def test_every_answer_carries_the_headers_that_protect_a_page(server: Server, honest: Page) -> None:
    for path in (
        "/",
        "/nowhere",
        "/voila/files/x.txt",
        f"/?token={TOKEN}",
        f"/api/kernels/{honest.kernel_id}",
    ):
        for cookie in (honest.cookie, ""):
            if path == "/" and cookie:
                continue  # a page costs a kernel; the browser's tests look at that one
            _, headers, _ = server.get(path, Cookie=cookie)
            policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
            assert policy["default-src"] == policy["base-uri"] == "'none'"
            assert policy["frame-ancestors"] == "'self'"
            assert policy["script-src"] == "'self' blob:"
            assert headers["X-Frame-Options"] == "SAMEORIGIN"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "same-origin"


def test_a_path_leads_to_no_file_of_the_machine(server: Server, honest: Page) -> None:
    for path in (
        "/voila/templates/cbviz/static/../../../../../../../../etc/passwd",
        "/voila/static/..%2f..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/voila/files/../../../etc/passwd",
        "/voila/templates/../x",
        "/voila/labextensions/..%2f..%2f..%2fetc/passwd",
        "/voila/files/explorer.ipynb",
        "//etc/passwd",
        "/etc/passwd",
    ):
        status, _, text = server.get(path, Cookie=honest.cookie)
        assert status >= 300, path
        assert "root:" not in text


# malformed in each layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\xfe garbage\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\n",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /%ff%fe%00?%ff=%00&token=%ed%a0%80 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    ],
    ids=range(12),
)
def test_malformed_http_costs_its_connection(server: Server, data: bytes) -> None:
    answer = server.raw(data, 2.0)
    assert b" 200 " not in answer[:20]


@pytest.mark.parametrize("subprotocols", [(), ("other",), ("v0.kernel.websocket.jupyter.org",)])
def test_a_socket_without_the_subprotocol_is_refused(hostile: Page, subprotocols: tuple[str, ...]) -> None:
    """Its messages would be read by another rule than they were written by, with a length of up to 2**64."""
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        hostile.open(subprotocols)
    assert refused.value.status_code == 400


def offsets(*numbers: int, tail: bytes = b"x" * 64) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in numbers) + tail


HEADER = json.dumps(
    {"msg_id": "a", "msg_type": "comm_msg", "session": "b", "username": "", "version": "5.3"}
).encode()


def a_message(content: bytes, kind: str = "comm_msg", channel: bytes = b"shell") -> bytes:
    return frame(channel, HEADER.replace(b"comm_msg", kind.encode()), b"{}", b"{}", content)


MALFORMED = {
    "empty": b"",
    "short": b"\x01",
    "most offsets": b"\xff" * 8,
    "2**31 offsets": offsets(2**31),
    "2**63 offsets": offsets(2**63),
    "no offsets": offsets(0),
    "one": offsets(1, 16),
    "backwards": offsets(6, 56, 50, 40, 30, 20, 10),
    "beyond": offsets(6, 56, 57, 58, 59, 60, 2**40),
    "into itself": offsets(6, 0, 1, 2, 3, 4, 120),
    "no such channel": frame(b"nowhere", HEADER, b"{}", b"{}", b"{}"),
    "channel of other bytes": frame(b"\xff\xfe", HEADER, b"{}", b"{}", b"{}"),
    "too few parts": frame(b"shell", HEADER, b"{}", b"{}"),
    "header is a list": frame(b"shell", b"[]", b"{}", b"{}", b"{}"),
    "header is empty": frame(b"shell", b"", b"{}", b"{}", b"{}"),
    "header without type": frame(b"shell", b'{"msg_id": "a", "session": "b"}', b"{}", b"{}", b"{}"),
    "type is a list": frame(
        b"shell", b'{"msg_type": [], "msg_id": "a", "session": "b"}', b"{}", b"{}", b"{}"
    ),
    "parent is a number": frame(b"shell", HEADER, b"7", b"{}", b"{}"),
    "metadata is null": frame(b"shell", HEADER, b"{}", b"null", b"{}"),
    "content is no JSON": a_message(b"{"),
    "content is a list": a_message(b"[]"),
    "content without a comm": a_message(b"{}"),
    "comm is a list": a_message(b'{"comm_id": [1]}'),
    "deep lists": a_message(b'{"comm_id": "a", "data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep objects": a_message(b'{"comm_id": "a", "d": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}"),
    "not a number": a_message(b'{"comm_id": "a", "data": NaN}'),
    "half a character": a_message(b'{"comm_id": "a", "data": "\\ud800"}'),
    "other bytes": a_message(b'{"comm_id": "\xff"}'),
    "a number of 10,000 digits": a_message(b'{"comm_id": "a", "data": ' + b"9" * 10_000 + b"}"),
    "code": a_message(b'{"code": "import os", "silent": false}', "execute_request"),
    "code as control": a_message(b'{"code": "1"}', "execute_request", b"control"),
    "input": a_message(b'{"value": "x"}', "input_reply", b"stdin"),
    "shutdown": a_message(b'{"restart": false}', "shutdown_request", b"control"),
    "interrupt": a_message(b"{}", "interrupt_request", b"control"),
    "debug": a_message(b"{}", "debug_request", b"control"),
    "complete": a_message(b'{"code": "x"}', "complete_request"),
    "a widget's message as control": a_message(b'{"comm_id": "a", "data": {}}', "comm_msg", b"control"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_costs_its_socket(hostile: Page, data: bytes) -> None:
    ws = hostile.open()
    ws.send_binary(data)
    assert ended(ws)


def test_text_where_binary_belongs_costs_its_socket(hostile: Page) -> None:
    for text in ("", "{}", '{"header": {"msg_type": "execute_request"}, "channel": "shell"}', "[" * 100_000):
        ws = hostile.open()
        ws.send(text)
        assert ended(ws), text[:40]


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\x05hello",
        b"\xf2\x80\x00\x00\x00\x00",
        b"\x83\x80\x00\x00\x00\x00",
        b"\x09\x80\x00\x00\x00\x00",
        b"\x82\xff\x3f" + b"\xff" * 7 + b"\x00" * 4,
        b"\x82\xff\xff" + b"\xff" * 7 + b"\x00" * 4,
        b"\x89\xfe\x04\x00" + b"\x00" * 1028,
        b"\x81\x81\x00\x00\x00\x00\xff",
        b"\x82\xff" + (2**20 + 1).to_bytes(8, "big") + b"\x00" * 4,
        b"\x02\x80\x00\x00\x00\x00" * 2,
        b"\x80\x80\x00\x00\x00\x00",
    ],
    ids=[
        "unmasked",
        "reserved bits",
        "reserved opcode",
        "fragmented control",
        "2**62 bytes",
        "2**64 bytes",
        "long ping",
        "no text",
        "over the limit",
        "two beginnings",
        "an end without a beginning",
    ],
)
def test_a_malformed_frame_costs_its_socket(hostile: Page, data: bytes) -> None:
    ws = hostile.open()
    ws.sock.sendall(data)
    assert ended(ws)


def test_a_message_over_the_limit_costs_its_socket(hostile: Page) -> None:
    ws = hostile.open()
    with suppress(OSError, websocket.WebSocketException):
        ws.send_binary(a_message(b'{"comm_id": "' + b"a" * 2**20 + b'"}'))
    assert ended(ws)


def test_messages_that_the_explorer_does_not_know_cost_nothing(hostile: Page) -> None:
    """Whole in every layer below; the kernel is the sender's own and answers on."""
    for content in (
        None,
        [],
        "x",
        7,
        {},
        {"type": 7},
        {"type": "ack"},
        {"type": "ack", "seq": "x"},
        {"type": "ack", "seq": 1e300},
        {"type": "cmd"},
        {"type": "cmd", "cmd": {}},
        {"type": "cmd", "cmd": "nothing"},
        {"type": "cmd", "cmd": "seek"},
        {"type": "cmd", "cmd": "seek", "step": 1e300},
        {"type": "cmd", "cmd": "seek", "step": {}},
        {"type": "cmd", "cmd": "speed", "value": "fast"},
        {"type": "cmd", "cmd": "set", "field": [], "value": {}},
        {"type": "cmd", "cmd": "restart"},
        {"type": "cmd", "cmd": "restart", "changes": 5},
        {"type": "cmd", "cmd": "add", "prompt": ["x"], "max_tokens": "x"},
        {"type": "cmd", "cmd": "policy", "source": "import os"},
        {"type": "cmd", "cmd": "add", "prompt": "a" * 200_000},
    ):
        hostile.say(content)
    hostile.is_served()


def test_a_flood_of_messages_and_sockets_slows_only_its_sender(hostile: Page, honest: Page) -> None:
    ws = hostile.open()
    for _ in range(3000):
        ws.send_binary(hostile.message("comm_msg", {"comm_id": "nowhere", "data": {}}))
    begun = [ws]
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        begun.extend(hostile.open() for _ in range(10))
    assert refused.value.status_code == 429
    honest.is_served()
    for s in begun:
        s.shutdown()


def test_a_client_that_goes_in_the_middle_leaves_nothing_behind(server: Server, hostile: Page) -> None:
    before = server.voila.num_fds() if hasattr(server.voila, "num_fds") else 0
    for _ in range(20):
        ws = hostile.open()
        ws.sock.sendall(b"\x82\xfe\x10\x00")  # the beginning of a frame
        ws.shutdown()
        server.raw(b"GET / HTTP/1.1\r\nHost: 127.0", 0.01)
    deadline = time.monotonic() + 30
    while before and server.voila.num_fds() > before + 10:
        assert time.monotonic() < deadline, f"{server.voila.num_fds()} files are open, {before} were"
        time.sleep(0.2)


# how many ---------------------------------------------------------------------------------------------------


def test_idle_connections_shut_nobody_out(server: Server, honest: Page) -> None:
    idle = []
    try:
        for _ in range(600):
            idle.append(socket.create_connection((server.host, server.port), timeout=10))
        honest.is_served()
        assert server.get("/nowhere", Cookie=honest.cookie)[0] in (302, 404)
    finally:
        for s in idle:
            s.close()


def test_when_the_server_is_full_a_page_says_so_and_room_comes_back(
    server: Server, honest: Page, hostile: Page
) -> None:
    third = Page(server)
    status, headers, text = server.get("/?scenario=chat", Cookie=server.enter())
    assert status == 503
    assert int(headers["Retry-After"]) > 0
    assert f"{MAX_PAGES} pages are open" in text
    assert "--max-pages" in text
    assert server.get(f"/api/kernels/{third.kernel_id}", Cookie=third.cookie)[0] == 200
    third.leave()
    server.until_kernels(2)


def test_two_hundred_opened_pages_cost_three_kernels_at_most(
    server: Server, honest: Page, hostile: Page
) -> None:
    """Opened with the token, and left before they are there: their kernels go at once."""
    cookie = server.enter()
    most = 0
    for i in range(200):
        with socket.create_connection((server.host, server.port), timeout=10) as s:
            s.sendall(
                (
                    f"GET /?scenario=chat&n={i} HTTP/1.1\r\nHost: {server.netloc}\r\nCookie: {cookie}\r\n\r\n"
                ).encode()
            )
        if i % 20 == 0:
            most = max(most, server.kernels)
    most = max(most, server.kernels)
    assert most <= MAX_PAGES
    server.until_kernels(2)
    honest.is_served()


def test_no_file_of_the_working_folder_was_run(server: Server) -> None:
    """The server and its kernels started in a folder of their own."""
    assert not (server.log.parent / "ran").exists(), (server.log.parent / "ran").read_text()
    assert (server.log.parent / "random.py").exists()


def test_the_log_holds_no_token_but_in_the_link(server: Server) -> None:
    lines = [line for line in Path(server.log).read_text("utf-8", "replace").splitlines() if TOKEN in line]
    assert len(lines) == 1
    assert lines[0].startswith("The explorer is at http://127.0.0.1:")
