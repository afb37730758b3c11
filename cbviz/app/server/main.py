"""Voilà as the explorer needs it: behind a guard, with bounded sizes, and with headers that let a page load
from here alone.

What reaches a kernel beside Voilà's own variables (QUERY_STRING and others):

* CBVIZ_BROWSER: a hash that stands for the browser which opened the page, the same for all its pages and
  after a restart of the server.
* CBVIZ_ALONE: 1 if only this machine can reach the server (loopback, no public address), else 0.

Both are absent in JupyterLab and where Voilà runs as an extension (Binder, JupyterHub): there a server
belongs to one user.
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from tornado import httputil, netutil
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.web import Application, OutputTransform, RequestHandler, authenticated
from traitlets import Integer, Unicode
from voila import handler as voila_handler
from voila.app import Voila
from voila.notebook_renderer import NotebookRenderer
from voila.tornado.handler import TornadoVoilaHandler
from voila.tornado.kernel_websocket_handler import VoilaKernelWebsocketHandler

from cbviz.app.server.guard import Guard, Refusal, Visitor, is_wildcard
from cbviz.app.server.kernels import BROWSER_HEADER, PAGE_MESSAGES, RETRY_AFTER_S, Full, PageKernels
from cbviz.app.server.sockets import CheckedConnection, PageSocket

MOST_HEADER_BYTES = 32 << 10
MOST_BODY_BYTES = 1 << 20
IDLE_S = 60.0
"""A connection without a request, or with half of one, is closed after so long."""
MOST_SOCKET_FOLDER = 40
"""Characters in the path of a folder for Unix sockets: the system allows about 100 for folder and name."""
MOST_CONNECTIONS = 400
"""Open connections; with more, those that never passed the guard are closed, the oldest first."""

HEARTBEAT = "<script>window.voila_heartbeat"
"""What Voilà writes into a page that takes long, so that no proxy gives it up: a script inside the page,
which the policy forbids.
"""
STILL_RUNNING = "<!-- still running -->\n"
KERNEL_ENDED = (
    "<p role=alert>The kernel behind this page ended while the page was being made. Reload the page to try "
    "again.</p>\n"
)
POLICY = {
    "default-src": "'none'",
    "script-src": "'self' blob:",
    "style-src": "'self' 'unsafe-inline'",
    "img-src": "'self' data: blob:",
    "font-src": "'self' data:",
    "connect-src": "'self'",
    "worker-src": "'self' blob:",
    "frame-ancestors": "'self'",
    "base-uri": "'none'",
    "form-action": "'self'",
}
"""The content security policy.

Scripts are files of the server, or modules that the widget makes (`blob:`); none stands in the page, none is
made of a text. Styles may stand in the page, because plotly, ipywidgets and Voilà write them there; pictures
may be data, because plotly and the canvases make them.
"""


class PageRenderer(NotebookRenderer):
    """Makes a page. Says so in the page where that fails: Voilà would write a line into its log, and the
    browser would wait for ever.
    """

    async def generate_content_generator(self, kernel_id: Any, kernel_future: Any) -> AsyncIterator[Any]:
        try:
            async for part in super().generate_content_generator(kernel_id, kernel_future):
                yield part
        except Exception:  # whatever the notebook, the kernel or the template raise
            self.log.exception("A page could not be made.")
            yield KERNEL_ENDED, None


class PageHandler(TornadoVoilaHandler):
    """A page. Says in words when there is no room; ends its kernel if the visitor leaves before the page is
    there.
    """

    kernel_id: str | None = None
    """The page's kernel; `PageKernels` fills it in."""
    left = False
    """The visitor closed the connection before the page was whole."""

    @authenticated
    async def get(self, path: str | None = None) -> None:
        try:
            await self._make(path)
        finally:
            if self.kernel_id is not None:
                self.kernel_manager.page_is_made(self.kernel_id)

    async def _make(self, path: str | None) -> None:
        """Runs the notebook and sends the page, part by part."""
        async for part in self.get_generator(path=path):
            if self.left:
                return
            if self.kernel_id is not None and self.kernel_id not in self.kernel_manager:
                self.write(KERNEL_ENDED)
                return
            self.write(STILL_RUNNING if part.startswith(HEARTBEAT) else part)
            self.flush()

    def on_connection_close(self) -> None:
        super().on_connection_close()
        self.left = True
        if self.kernel_id is not None:
            IOLoop.current().add_callback(self.kernel_manager.give_back, self.kernel_id)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = (kwargs.get("exc_info") or (None, None))[1]
        if isinstance(error, Full):
            pages = "One page is" if error.most == 1 else f"{error.most} pages are"
            _answer(
                self,
                Refusal(
                    503,
                    f"{pages} open, as many as this server has room for. Close one that you don't need, "
                    "then reload this page. "
                    "The server's owner can allow more with --max-pages.",
                    RETRY_AFTER_S,
                ),
            )
            return
        super().write_error(status_code, **kwargs)


class _Refuse(RequestHandler):
    """Answers for the guard."""

    def initialize(self, answer: Refusal | Visitor) -> None:
        self._given = answer

    def prepare(self) -> None:
        if isinstance(self._given, Refusal):
            _answer(self, self._given)
        else:
            self.redirect(self._given.forward_to or "/")

    def check_xsrf_cookie(self) -> None:
        """Nothing is done here that another site could want."""


def _answer(handler: RequestHandler, refusal: Refusal) -> None:
    """A short page that needs no script."""
    handler.set_status(refusal.status)
    handler.set_header("Content-Type", "text/html; charset=utf-8")
    handler.set_header("Cache-Control", "no-store")
    if refusal.retry_after_s is not None:
        handler.set_header("Retry-After", str(refusal.retry_after_s))
    title = "The server is full" if refusal.status == 503 else "Not here"
    handler.finish(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
        f"content='width=device-width'><title>{title} - cbviz</title>"
        f"<style>body{{font:16px system-ui,sans-serif;max-width:36em;margin:4em auto;padding:0 "
        f"1em;color-scheme:light dark}}</style>"
        f"<h1>{title}</h1><p>{html.escape(refusal.text)}</p></html>\n"
    )


def _visitor(request: httputil.HTTPServerRequest) -> Visitor | None:
    return request.__dict__.get("cbviz_visitor")


class _Headers(OutputTransform):
    """Gives each answer, of whatever handler, the headers that protect a page."""

    def __init__(self, request: httputil.HTTPServerRequest) -> None:
        self._request = request

    def transform_first_chunk(
        self, status_code: int, headers: httputil.HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, httputil.HTTPHeaders, bytes]:
        host = self._request.host
        policy = (
            {**POLICY, "connect-src": f"'self' ws://{host} wss://{host}"}
            if '"' not in host and ";" not in host
            else POLICY
        )
        headers["Content-Security-Policy"] = "; ".join(f"{k} {v}" for k, v in policy.items())
        headers["X-Frame-Options"] = "SAMEORIGIN"
        headers["Referrer-Policy"] = "same-origin"
        headers["X-Content-Type-Options"] = "nosniff"
        headers["Cross-Origin-Resource-Policy"] = "same-origin"
        headers["Cross-Origin-Opener-Policy"] = "same-origin"
        visitor = _visitor(self._request)
        if visitor is not None and visitor.cookie is not None:
            headers.add("Set-Cookie", visitor.cookie)
        return status_code, headers, chunk


class GuardedRouter(httputil.HTTPServerConnectionDelegate):
    """Stands before the application: no handler sees a request that the guard did not let in."""

    def __init__(self, guard: Guard, application: Application) -> None:
        self._guard = guard
        self._application = application

    def start_request(
        self, server_conn: object, request_conn: httputil.HTTPConnection
    ) -> httputil.HTTPMessageDelegate:
        return _GuardedRequest(self._guard, self._application, request_conn)


class _GuardedRequest(httputil.HTTPMessageDelegate):
    """One request: the guard looks at its headers, then the application's own delegate takes over."""

    def __init__(self, guard: Guard, application: Application, connection: httputil.HTTPConnection) -> None:
        self._guard = guard
        self._application = application
        self._connection = connection
        self._delegate: httputil.HTTPMessageDelegate | None = None

    def headers_received(self, start_line: Any, headers: httputil.HTTPHeaders) -> Any:
        headers.pop(BROWSER_HEADER, None)
        line = start_line._replace(path=under(self._guard.base_url, start_line.path))
        request = httputil.HTTPServerRequest(connection=self._connection, start_line=line, headers=headers)
        answer = self._guard.check(request)
        if isinstance(answer, Refusal) or answer.forward_to is not None:
            self._delegate = self._application.get_handler_delegate(request, _Refuse, {"answer": answer})
        else:
            headers[BROWSER_HEADER] = answer.browser
            stream = getattr(self._connection, "stream", None)
            if stream is not None:
                stream.cbviz_known = True
            self._delegate = self._application.find_handler(request)
        if isinstance(answer, Visitor):
            request.__dict__["cbviz_visitor"] = answer
        return self._delegate.headers_received(line, headers)

    def data_received(self, chunk: bytes) -> Any:
        return self._delegate.data_received(chunk) if self._delegate is not None else None

    def finish(self) -> None:
        if self._delegate is not None:
            self._delegate.finish()

    def on_connection_close(self) -> None:
        if self._delegate is not None:
            self._delegate.on_connection_close()


def under(base_url: str, uri: str) -> str:
    """`uri` below `base_url`: a proxy may have taken that path away, or passed it on."""
    path, mark, query = uri.partition("?")
    path = "/" + path.lstrip("/\\")
    if not (path + "/").startswith(base_url):
        path = base_url + path[1:]
    return path + mark + query


class BoundedServer(HTTPServer):
    """Closes connections that never passed the guard, the oldest first, when there are too many."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        super().initialize(*args, **kwargs)
        self._streams: dict[Any, None] = {}

    def handle_stream(self, stream: Any, address: Any) -> None:
        for old in [s for s in self._streams if s.closed()]:
            del self._streams[old]
        if len(self._streams) >= MOST_CONNECTIONS:
            strangers = (s for s in self._streams if not getattr(s, "cbviz_known", False))
            if (old := next(strangers, None)) is None:
                stream.close()
                return
            del self._streams[old]
            old.close()
        self._streams[stream] = None
        super().handle_stream(stream, address)


class ExplorerServer(Voila):
    """Voilà with the guard.

    The token comes from the environment (CBVIZ_TOKEN), where other users of the machine cannot read it.
    """

    public = Unicode("", config=True, help="Scheme and host that users see, if a proxy stands in front.")
    max_pages = Integer(0, config=True, help="The most pages at a time; 0: no limit.")
    aliases = {**Voila.aliases, "max_pages": "ExplorerServer.max_pages"}

    def initialize(self, argv: Any = None) -> None:
        self._token = os.environ.pop("CBVIZ_TOKEN", "")
        super().initialize(argv)

    @property
    def guard(self) -> Guard:
        return Guard(
            self.ip, self.port, self.base_url, self._token, self.public, owner=self.kernel_manager.owner
        )

    def init_settings(self) -> dict[str, Any]:
        v = self.voila_configuration
        v.multi_kernel_manager_class = PageKernels
        v.http_header_envs = [*v.http_header_envs, BROWSER_HEADER]
        v.allow_template_override = "NO"
        voila_handler.NotebookRenderer = PageRenderer
        self.kernel_websocket_connection_class = CheckedConnection
        os.environ["CBVIZ_ALONE"] = "1" if Guard(self.ip, self.port, public=self.public).alone else "0"
        if os.name == "posix" and len(self.connection_dir) <= MOST_SOCKET_FOLDER:
            self.config.KernelManager.transport = (
                "ipc"  # between server and kernel nothing goes over the network
            )
        settings: dict[str, Any] = super().init_settings()
        self.kernel_manager.max_pages = self.max_pages
        raise_file_limit()
        self.kernel_manager.allowed_message_types = list(PAGE_MESSAGES)
        return {
            **settings,
            "log_function": lambda handler: None,
            "xsrf_cookie_kwargs": {"samesite": "Lax", "path": self.base_url},
        }

    def init_handlers(self) -> list[Any]:
        ours = {TornadoVoilaHandler: PageHandler, VoilaKernelWebsocketHandler: PageSocket}
        return [(h[0], ours.get(h[1], h[1]), *h[2:]) for h in super().init_handlers()]

    def listen(self) -> None:
        """Listens on the port that was asked for, and on no other: its address has been told already."""
        self.app.add_transform(_Headers)
        server = BoundedServer(
            GuardedRouter(self.guard, self.app),
            max_header_size=MOST_HEADER_BYTES,
            max_body_size=MOST_BODY_BYTES,
            max_buffer_size=4 * MOST_BODY_BYTES,
            idle_connection_timeout=IDLE_S,
            body_timeout=IDLE_S,
        )
        try:
            server.add_sockets(bind(self.ip, self.port))
        except OSError as e:
            self.stop()
            sys.exit(
                f"port {self.port} on {self.ip} can't be used: {e.strerror or e}. Choose another with --port."
            )
        self.ioloop = IOLoop.current()
        try:
            self.ioloop.start()
        except KeyboardInterrupt:
            pass
        finally:
            self.stop()


def raise_file_limit() -> None:
    """Lets the server open as many files as the system allows it: a kernel takes about twenty, a connection
    one.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> list[Any]:
    """Sockets on `host`; for `::` on IPv4 too, where the machine has it. Raises OSError."""
    sockets = netutil.bind_sockets(port, host)
    if is_wildcard(host) and ":" in host:
        try:
            sockets += netutil.bind_sockets(port, "0.0.0.0")
        except OSError:
            pass
    return sockets
