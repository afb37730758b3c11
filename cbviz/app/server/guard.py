"""Who may ask the explorer's server for anything.

Owns the rules for Host, Origin, token and cookie; knows no page and no kernel.

A web page on another site must not drive the server, not even through a name that points to this machine (DNS
rebinding). So each request, of whatever route, is checked before any handler sees it:

1. `Host` names the address that the server was told to listen on, or the one of `--base-url`.
2. `Origin`, where there is one, is that same address.
3. A browser that says that another site asks (`Sec-Fetch-Site`) gets an answer only if a user follows a link.
4. The token was given once, in the opened address; from then on the browser's cookie is the key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode, urlsplit

from tornado.httputil import HTTPServerRequest

COOKIE_DAYS = 30
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_BROWSER = re.compile(r"[A-Za-z0-9_-]{22}")
_KERNEL = re.compile(r"/api/(?:kernels|shutdown)/([0-9A-Fa-f]+(?:-[0-9A-Fa-f]+){4})(?:/|$)")


def is_loopback(host: str) -> bool:
    """Whether `host` is a name or address that only this machine itself can reach."""
    name = host.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether `host` means every address of this machine."""
    return host.strip("[]") in ("", "0.0.0.0", "::")


def is_address(host: str) -> bool:
    """Whether `host` is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def own_names() -> set[str]:
    """The names under which other machines may know this one."""
    short = socket.gethostname().lower()
    return {short, f"{short.partition('.')[0]}.local", socket.getfqdn().lower()}


@dataclass(frozen=True)
class Refusal:
    """An answer other than the page: its status, and one or two sentences for the visitor."""

    status: int
    text: str
    retry_after_s: int | None = None


@dataclass
class Visitor:
    """What the guard found out about a request that it let through."""

    browser: str
    """A hash that stands for the browser; '' for a program that sent the token in a header."""
    cookie: str | None = None
    """A `Set-Cookie` header for the answer."""
    forward_to: str | None = None
    """Where the browser is sent instead, so that the token leaves its address."""


@dataclass(frozen=True)
class Guard:
    """The rules for one server.

    `public`: the scheme and host that users see behind a proxy, such as `https://uni.example`.
    """

    host: str
    port: int
    base_url: str = "/"
    token: str = ""
    public: str = ""
    owner: Callable[[str], str | None] = field(default=lambda kernel_id: None)
    """Returns the browser for which a kernel was started; None if the kernel is unknown."""

    @property
    def alone(self) -> bool:
        """Whether only this machine's user can reach the server."""
        return is_loopback(self.host) and (
            not self.public or is_loopback(urlsplit(self.public).hostname or "")
        )

    @property
    def cookie_name(self) -> str:
        """The cookie's name; with the port, because browsers send one host's cookies to all of its ports."""
        return f"cbviz-{self.port}"

    # the four rules -----------------------------------------------------------------------------------------

    def check(self, request: HTTPServerRequest) -> Visitor | Refusal:
        """Lets the request in, sends it on, or refuses it. Decides by headers and address alone."""
        return (
            self._check_host(request)
            or self._check_origin(request)
            or self._check_site(request)
            or self._check_key(request)
        )

    def _check_host(self, request: HTTPServerRequest) -> Refusal | None:
        given = request.headers.get_list("Host")
        m = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if m is None:
            return Refusal(400, "The request names no host, or more than one.")
        name, port = m.group(1).lower().rstrip("."), m.group(2)
        if self.public and given[0].lower() == urlsplit(self.public).netloc:
            return None
        if not self._knows(name):
            return Refusal(
                403,
                f"This server does not know itself as {name}. Open it at the address that its terminal "
                "shows. "
                f"If {name} is right, start the server with --base-url http://{given[0]}/",
            )
        if not is_loopback(name) and int(port or 80) != self.port:
            return Refusal(
                403,
                (
                    f"This server listens on port {self.port}. If a proxy stands in front of it, start it "
                    "with "
                    "--base-url and the proxy's address."
                ),
            )
        return None

    def _knows(self, name: str) -> bool:
        bare = name.strip("[]")
        if is_loopback(name):
            return is_loopback(self.host) or is_wildcard(self.host)
        if is_wildcard(self.host):
            return is_address(name) or bare in own_names()  # an address cannot be rebound, only a name can
        return bare == self.host.strip("[]").lower()

    def _check_origin(self, request: HTTPServerRequest) -> Refusal | None:
        host = request.headers["Host"].lower()
        allowed = {self.public} if self.public else set()
        if not self.public or host != urlsplit(self.public).netloc:
            allowed.add(f"http://{host}")
        for header in ("Origin", "Sec-Websocket-Origin"):
            for origin in request.headers.get_list(header):
                if origin.lower() not in allowed:
                    return Refusal(
                        403, "A page of another site asked for this. Only the explorer's own pages may."
                    )
        return None

    def _check_site(self, request: HTTPServerRequest) -> Refusal | None:
        """A link from elsewhere is followed; a picture, frame, script or fetch from elsewhere gets nothing,
        since each page costs a kernel.
        """
        if request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
            return None
        wanted = (request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest"))
        if request.method == "GET" and wanted == ("navigate", "document"):
            return None
        return Refusal(
            403, "A page of another site asked for this. Only a link that a user follows may lead here."
        )

    def _check_key(self, request: HTTPServerRequest) -> Visitor | Refusal:
        browser, valid = self._read_cookie(request)
        arguments = parse_qsl(request.query, keep_blank_values=True)
        in_address = [v for k, v in arguments if k == "token"]
        if self.token and not valid:
            if any(self._is_token(v) for v in in_address):
                valid = True
            elif self._is_token(_bearer(request.headers)):
                return self._own_kernel(request, Visitor(""))
        if self.token and not valid:
            wrong = (
                "The token in this address is not this server's: it was started again since."
                if in_address
                else "This server asks for a token."
            )
            return Refusal(403, f"{wrong} Open the link that cbviz explore shows in its terminal.")
        if in_address:
            if request.method not in ("GET", "HEAD"):
                return Refusal(400, "A token in the address goes with GET only.")
            rest = urlencode([(k, v) for k, v in arguments if k != "token"])
            browser = browser or _new_browser()
            return Visitor(
                _hash(browser), self._set_cookie(browser), request.path + (f"?{rest}" if rest else "")
            )
        if not browser:
            browser = _new_browser()
            return self._own_kernel(request, Visitor(_hash(browser), self._set_cookie(browser)))
        return self._own_kernel(request, Visitor(_hash(browser)))

    def _own_kernel(self, request: HTTPServerRequest, visitor: Visitor) -> Visitor | Refusal:
        """A kernel answers only the browser whose page started it."""
        m = _KERNEL.search(request.path)
        if m is not None and self.owner(m.group(1)) != visitor.browser:
            return Refusal(404, "There is no such kernel.")
        return visitor

    # token and cookie ---------------------------------------------------------------------------------------

    def _is_token(self, text: str) -> bool:
        return bool(self.token) and hmac.compare_digest(text.encode("utf-8", "replace"), self.token.encode())

    def _sign(self, browser: str) -> str:
        return hmac.new(
            self.token.encode() or b"no token", f"cbviz cookie {browser}".encode(), hashlib.sha256
        ).hexdigest()[:32]

    def _read_cookie(self, request: HTTPServerRequest) -> tuple[str, bool]:
        """The browser's secret ('' if it has none), and whether it was signed with the token that is valid
        now.
        """
        try:
            jar: SimpleCookie = SimpleCookie(request.headers.get("Cookie", ""))
        except CookieError:
            return "", False
        morsel = jar.get(self.cookie_name)
        browser, _, signature = morsel.value.partition(".") if morsel is not None else ("", "", "")
        if not _BROWSER.fullmatch(browser):
            return "", False
        return browser, hmac.compare_digest(
            signature.encode("utf-8", "replace"), self._sign(browser).encode()
        )

    def _set_cookie(self, browser: str) -> str:
        secure = "; Secure" if self.public.startswith("https:") else ""
        return (
            f"{self.cookie_name}={browser}.{self._sign(browser)}; Path={self.base_url}; "
            f"Max-Age={COOKIE_DAYS * 86400}; "
            f"HttpOnly; SameSite=Lax{secure}"
        )


def _new_browser() -> str:
    return secrets.token_urlsafe(16)


def _hash(browser: str) -> str:
    return hashlib.sha256(f"cbviz browser {browser}".encode()).hexdigest()[:32]


def _bearer(headers: Mapping[str, str]) -> str:
    """The token of a program, from `Authorization: token ...` or `Bearer ...`."""
    kind, _, value = headers.get("Authorization", "").partition(" ")
    return value.strip() if kind.lower() in ("token", "bearer") else ""
