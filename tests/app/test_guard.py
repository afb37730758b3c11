"""The guard's four rules: Host, Origin, a request from another site, and the token or its cookie."""

from __future__ import annotations

import pytest
from tornado.httputil import HTTPHeaders, HTTPInputError, HTTPServerRequest, RequestStartLine

from cbviz.app.server.guard import Guard, Refusal, Visitor
from cbviz.app.server.main import under

TOKEN = "a-token-for-tests"
KERNEL = "0f3c3a52-1111-4222-8333-444455556666"


def ask(guard: Guard, path: str = "/", method: str = "GET", **headers: str | None) -> Visitor | Refusal:
    """What `guard` answers; headers are named with underscores, None leaves one out."""
    given = HTTPHeaders()
    for name, value in {
        "Host": f"127.0.0.1:{guard.port}",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }.items():
        if value is not None:
            given.add(name, value)
    try:
        request = HTTPServerRequest(
            start_line=RequestStartLine(method, path, "HTTP/1.1"), headers=given, connection=FakeConnection()
        )
    except HTTPInputError:
        return Refusal(400, "refused by tornado itself")
    return guard.check(request)


class FakeConnection:
    """What a request reads of its connection."""

    context = type("Context", (), {"remote_ip": "127.0.0.1", "protocol": "http"})()


def entered(guard: Guard, **headers: str | None) -> dict[str, str]:
    """The headers of a browser that came in through the link."""
    first = ask(guard, f"/?token={guard.token}", **headers)
    assert isinstance(first, Visitor)
    assert first.cookie is not None
    return {"Cookie": first.cookie.partition(";")[0]}


def status(answer: Visitor | Refusal) -> int:
    return answer.status if isinstance(answer, Refusal) else 302 if answer.forward_to is not None else 200


LOOPBACK = Guard("127.0.0.1", 8866)
NETWORK = Guard("0.0.0.0", 8866)
PROXIED = Guard("127.0.0.1", 8866, "/class/", public="https://uni.example")


@pytest.mark.parametrize(
    ("guard", "host", "right"),
    [
        (LOOPBACK, "127.0.0.1:8866", True),
        (LOOPBACK, "localhost:8866", True),
        (LOOPBACK, "LOCALHOST:8866", True),
        (LOOPBACK, "[::1]:8866", True),
        (LOOPBACK, "localhost:9000", True),  # a tunnel from another port
        (LOOPBACK, "evil.example:8866", False),
        (LOOPBACK, "evil.example", False),
        (LOOPBACK, "127.0.0.1.evil.example:8866", False),
        (LOOPBACK, "192.168.1.5:8866", False),
        (LOOPBACK, "localhost.evil.example:8866", False),
        (LOOPBACK, "", False),
        (LOOPBACK, None, False),
        (LOOPBACK, "user@127.0.0.1:8866", False),
        (LOOPBACK, "127.0.0.1:8866, evil.example", False),
        (LOOPBACK, "127.0.0.1:8866/", False),
        (LOOPBACK, "[::1", False),
        (LOOPBACK, "2130706433:8866", False),
        (NETWORK, "10.1.2.3:8866", True),
        (NETWORK, "127.0.0.1:8866", True),
        (NETWORK, "evil.example:8866", False),
        (NETWORK, "10.1.2.3:80", False),
        (Guard("::", 8866), "[fd00::5]:8866", True),
        (Guard("::", 8866), "[fd00::5]", False),
        (Guard("lab7.example", 8866), "lab7.example:8866", True),
        (Guard("lab7.example", 8866), "lab8.example:8866", False),
        (PROXIED, "uni.example", True),
        (PROXIED, "uni.example:443", False),
        (PROXIED, "127.0.0.1:8866", True),
        (PROXIED, "evil.example", False),
    ],
)
def test_a_host_must_be_the_address_that_the_server_was_told(
    guard: Guard, host: str | None, right: bool
) -> None:
    assert (status(ask(guard, Host=host)) == 200) is right


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?scenario=chat",
        "/voila/static/x.js",
        "/voila/templates/cbviz/static/page.js",
        "/api/kernels/" + KERNEL,
        "/api/kernels/" + KERNEL + "/channels",
        "/voila/api/shutdown/" + KERNEL,
        "/voila/files/x.png",
        "/nowhere",
        "/login",
    ],
)
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:8866"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:5000"},
        {"Origin": "https://127.0.0.1:8866"},
        {"Sec_Websocket_Origin": "http://evil.example"},
        {"Host": "evil.example:8866", "Origin": "http://evil.example:8866"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_no_route_answers_another_site_even_with_the_cookie(path: str, headers: dict[str, str]) -> None:
    guard = Guard("127.0.0.1", 8866, token=TOKEN, owner=lambda kernel_id: None)
    assert status(ask(guard, path, **entered(guard), **headers)) == 403


def test_own_origin_is_let_in_and_a_proxys_is_known_by_its_scheme() -> None:
    assert status(ask(LOOPBACK, Origin="http://127.0.0.1:8866")) == 200
    assert status(ask(PROXIED, "/class/", Host="uni.example", Origin="https://uni.example")) == 200
    assert status(ask(PROXIED, "/class/", Host="uni.example", Origin="http://uni.example")) == 403
    assert (
        status(ask(PROXIED, "/class/", Origin="https://uni.example")) == 200
    )  # a proxy that writes its own Host


def test_a_link_on_another_site_is_followed_a_frame_there_is_not() -> None:
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert status(ask(LOOPBACK, "/?scenario=chat", **link)) == 200
    assert status(ask(LOOPBACK, "/?scenario=chat", **{**link, "Sec_Fetch_Dest": "iframe"})) == 403
    assert status(ask(LOOPBACK, "/voila/api/shutdown/" + KERNEL, "POST", **link)) == 403


def test_the_token_opens_once_and_leaves_the_address() -> None:
    guard = Guard("127.0.0.1", 8866, token=TOKEN)
    first = ask(guard, f"/?scenario=chat&token={TOKEN}&seed=3")
    assert isinstance(first, Visitor)
    assert first.forward_to == "/?scenario=chat&seed=3"
    assert first.cookie is not None
    for part in ("cbviz-8866=", "HttpOnly", "SameSite=Lax", "Path=/"):
        assert part in first.cookie
    assert TOKEN not in first.cookie
    cookie = entered(guard)
    assert status(ask(guard, "/?scenario=chat", **cookie)) == 200
    assert status(ask(guard, "/?token=an-older-one", **cookie)) == 302  # the bookmark of an earlier start
    assert status(ask(guard)) == 403
    assert status(ask(guard, "/?token=wrong")) == 403
    assert status(ask(guard, "/?token=")) == 403
    assert status(ask(guard, f"/?tokens={TOKEN}")) == 403
    assert status(ask(guard, Authorization=f"token {TOKEN}")) == 200
    assert status(ask(guard, Authorization="token wrong")) == 403


@pytest.mark.parametrize(
    "cookie",
    [
        "",
        "cbviz-8866=",
        "cbviz-8866=x.y",
        "cbviz-8866=" + "A" * 22,
        "cbviz-8866=" + "A" * 22 + "." + "0" * 32,
        "=;=;=",
        "\xff\xfe",
        "a" * 5000,
    ],
)
def test_a_cookie_that_was_not_given_here_opens_nothing(cookie: str) -> None:
    assert status(ask(Guard("127.0.0.1", 8866, token=TOKEN), Cookie=cookie)) == 403


def test_a_browser_keeps_its_name_when_the_server_starts_again() -> None:
    old, new = (Guard("127.0.0.1", 8866, token=t) for t in ("first-token", "second-token"))
    cookie = entered(old)
    before = ask(old, **cookie)
    assert status(ask(new, **cookie)) == 403
    after = ask(new, "/?token=second-token", **cookie)
    assert isinstance(before, Visitor)
    assert isinstance(after, Visitor)
    assert before.browser == after.browser
    stranger = ask(new, "/?token=second-token")
    assert isinstance(stranger, Visitor)
    assert stranger.browser != before.browser


def test_a_kernel_answers_only_the_browser_that_opened_it() -> None:
    kernels: dict[str, str] = {}
    guard = Guard("127.0.0.1", 8866, token=TOKEN, owner=kernels.get)
    mine, other = entered(guard), entered(guard)
    me = ask(guard, **mine)
    assert isinstance(me, Visitor)
    kernels[KERNEL] = me.browser
    for path in (
        f"/api/kernels/{KERNEL}",
        f"/api/kernels/{KERNEL}/channels?session_id=x",
        f"/voila/api/shutdown/{KERNEL}",
    ):
        assert status(ask(guard, path, **mine)) == 200
        assert status(ask(guard, path, **other)) == 404


@pytest.mark.parametrize(
    ("uri", "became"),
    [
        ("/", "/class/"),
        ("/class/", "/class/"),
        ("/class", "/class"),
        ("/class/x?a=/y", "/class/x?a=/y"),
        ("/x", "/class/x"),
        ("/classy", "/class/classy"),
        ("//evil.example/?token=x", "/class/evil.example/?token=x"),
        ("/\\evil.example", "/class/evil.example"),
        ("http://evil.example/", "/class/http://evil.example/"),
        ("", "/class/"),
    ],
)
def test_every_path_lies_below_the_base_and_none_leads_elsewhere(uri: str, became: str) -> None:
    assert under("/class/", uri) == became


@pytest.mark.parametrize(
    ("guard", "alone"),
    [
        (LOOPBACK, True),
        (Guard("::1", 1), True),
        (Guard("localhost", 1), True),
        (NETWORK, False),
        (Guard("::", 1), False),
        (Guard("10.0.0.1", 1), False),
        (PROXIED, False),
        (Guard("127.0.0.1", 1, public="http://localhost:9000"), True),
    ],
)
def test_alone_means_that_only_this_machine_reaches_the_server(guard: Guard, alone: bool) -> None:
    assert guard.alone is alone
