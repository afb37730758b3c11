"""Serves the explorer with Voilà, and the notebooks with JupyterLab.

Owns the servers' settings; knows nothing of sessions.

Both run as child processes with our template and settings put in front of the user's search paths, so that
nobody's own configuration is replaced. Nothing is written into the user's folders, and no page loads anything
from another host. They start in an empty folder: a `random.py` or `voila.py` in the working folder is never
imported.

What the explorer's server tells each kernel, as environment variables (`cbviz.app.server.main` sets them):

* CBVIZ_BROWSER: a hash that stands for the browser which opened the page; the same for all its pages, also
  after a restart.
* CBVIZ_ALONE: 1 if only this machine can reach the server, 0 if others can (a class).

Both are absent in JupyterLab and where Voilà is an extension of a user's own server (Binder, JupyterHub).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbviz.config import ConfigError

APP = Path(__file__).parent
JUPYTER = APP / "jupyter"
TEMPLATE = "cbviz"
CULL_IDLE_S = 120
"""A kernel whose page is gone for so long is shut down (an open page keeps its kernel)."""
CULL_EVERY_S = 30
DEFAULT_PORT = 8866
PAGE_BYTES = 0.35e9
"""Memory of a page with the real model; docs/teaching.md has what one takes, measured."""
LIGHT_PAGE_BYTES = 0.08e9
"""Memory of a page with the simulator or recorded tokens."""


def configure_voila(c: Any) -> None:
    """Kernels go when their page is closed, and the kernel's websocket knows no delay.

    `c` is the traitlets config that is being loaded.
    """
    c.MappingKernelManager.cull_idle_timeout = CULL_IDLE_S
    c.MappingKernelManager.cull_interval = CULL_EVERY_S
    c.MappingKernelManager.cull_connected = False
    check_messages(c)
    set_nodelay()
    hear_replies()
    hand_out_xsrf_cookie()


def check_messages(c: Any) -> None:
    """A malformed message on a kernel's websocket closes that socket, and costs the server nothing."""
    from cbviz.app.server.sockets import CheckedConnection

    c.ServerApp.kernel_websocket_connection_class = CheckedConnection


def hand_out_xsrf_cookie() -> None:
    """A page that is left asks Voilà to end its kernel, with a token from a cookie that Voilà itself never
    sets (and so answers 403).
    """
    from voila.handler import VoilaHandler as Handler

    if getattr(Handler, "_cbviz_cookie", False):
        return
    before = Handler.prepare

    async def prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        done = before(self, *args, **kwargs)
        if done is not None:
            await done
        self.xsrf_token  # noqa: B018  # reading it sets the cookie

    Handler.prepare = prepare
    Handler._cbviz_cookie = True


def set_nodelay() -> None:
    """Sends each message of a kernel at once: without it TCP holds small ones back for 40 ms (Nagle's
    algorithm against delayed acknowledgement).
    """
    from jupyter_server.services.kernels.websocket import KernelWebsocketHandler as Handler

    if getattr(Handler, "_cbviz_nodelay", False):
        return
    before = Handler.open

    async def open(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.set_nodelay(True)
        return await before(self, *args, **kwargs)

    setattr(Handler, "open", open)  # noqa: B010  # a method of another library's class, replaced knowingly
    setattr(Handler, "_cbviz_nodelay", True)  # noqa: B010


def hear_replies() -> None:
    """Looks for what has come after each message to a kernel.

    Without it a cell with an output widget (`interact`) can hang for ever.

    While nbclient waits for a cell's reply, it sends the widget's outputs on the same socket. jupyter_client
    8.10 sends past pyzmq's asyncio socket. If the reply comes at that moment, the send takes away the one
    sign that something is there to be read, and nobody reads it.
    """
    import zmq
    from jupyter_client.channels import AsyncZMQSocketChannel as Channel

    if getattr(Channel, "_cbviz_hears", False):
        return
    before = Channel.send

    def send(self: Any, msg: dict[str, Any]) -> None:
        before(self, msg)
        if self.socket is not None:
            self.socket.get(zmq.EVENTS)  # asking an asyncio socket wakes whoever waits for it

    setattr(Channel, "send", send)  # noqa: B010  # a method of another library's class, replaced knowingly
    setattr(Channel, "_cbviz_hears", True)  # noqa: B010


def notebooks() -> Path:
    """The folder of notebooks: the checkout's, or the one inside the installed package."""
    for folder in (APP.parent.parent / "notebooks", APP / "notebooks"):
        if (folder / "explorer.ipynb").exists():
            return folder
    raise FileNotFoundError("explorer.ipynb is not where it should be: install cbviz again")


def free_port(host: str, wanted: int | None = None) -> int:
    """`wanted`, or a free port from 8866 on.

    Raises OSError naming the option that is wrong: --host or --port.
    """
    reason = ""
    for port in [wanted] if wanted is not None else range(DEFAULT_PORT, DEFAULT_PORT + 100):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except (OSError, UnicodeError) as e:
            raise OSError(
                f"--host {host} is no name or address of this machine: {getattr(e, 'strerror', None) or e}"
            ) from None
        try:
            with socket.socket(family, kind, protocol) as s:
                if os.name == "posix":
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind(address)
                return port
        except OSError as e:
            reason = e.strerror or str(e)
            if e.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise OSError(f"--host {host} is no address of this machine: {reason}") from None
    if wanted is not None:
        raise OSError(f"port {wanted} on {host} can't be used: {reason}. Choose another with --port.")
    raise OSError(f"no free port from {DEFAULT_PORT} to {DEFAULT_PORT + 99} on {host}: name one with --port")


def environment(**more: str) -> dict[str, str]:
    """The environment of a server: ours, with our template and JupyterLab settings in front of the search
    paths.

    Paths in it are made absolute, because the server starts in a folder of its own.
    """
    env = dict(os.environ)
    env.pop("CBVIZ_TOKEN", None)
    for name in ("PYTHONPATH", "JUPYTER_PATH", "JUPYTER_CONFIG_PATH"):
        if name in env:
            env[name] = os.pathsep.join(os.path.abspath(p) for p in env[name].split(os.pathsep) if p)
    for name in ("CBVIZ_CACHE", "HF_HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        if env.get(name):
            env[name] = os.path.abspath(os.path.expanduser(env[name]))
    for name, folder in (("JUPYTER_PATH", JUPYTER), ("JUPYTER_CONFIG_PATH", JUPYTER / "config")):
        env[name] = os.pathsep.join([str(folder), *filter(None, [env.get(name)])])
    return {**env, **more}


def python_command(module: str) -> list[str]:
    """Runs `module` without the working folder on the import path, on Pythons that can (the folder is empty
    anyway).
    """
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", module]


def explore_command(
    notebook: Path,
    host: str,
    port: int,
    extra: Sequence[str] = (),
    *,
    base_url: str = "/",
    public: str = "",
    max_pages: int = 0,
) -> list[str]:
    """The server on one notebook, or on a folder of them.

    Our settings file stands last in the list of folders, so that the user's own win.

    The token, if there is one, goes into the environment as CBVIZ_TOKEN: all users of a machine can read a
    command.
    """
    from jupyter_core.paths import jupyter_config_path

    folders = [*jupyter_config_path(), str(JUPYTER / "config")]
    return [
        *python_command("cbviz.app.server"),
        str(notebook),
        f"--port={port}",
        f"--Voila.ip={host}",
        f"--Voila.base_url={base_url}",
        "--no-browser",
        f"--template={TEMPLATE}",
        f"--ExplorerServer.public={public}",
        f"--ExplorerServer.max_pages={max_pages}",
        "--Voila.log_level=ERROR",
        "--show_tracebacks=True",
        *(f"--Voila.config_file_paths={f}" for f in folders),
        *extra,
    ]


def check_token(token: str) -> str:
    """`token`, if it can stand in an address and is hard to guess. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9._~-]{8,200}", token):
        raise ConfigError("--token must have 8 to 200 characters: letters, digits, and . _ ~ -")
    return token


def split_base_url(given: str) -> tuple[str, str]:
    """The address of `--base-url` as (scheme and host, path): `/class` or `https://uni.example/class/`.
    Raises ConfigError.
    """
    try:
        parts = urllib.parse.urlsplit(given)
        whole = bool(parts.scheme or parts.netloc)
        fine = not (parts.query or parts.fragment or parts.username or parts.password) and (
            parts.port is None or parts.port > 0
        )
    except ValueError:
        fine = whole = False
    if (
        not fine
        or (whole and (parts.scheme not in ("http", "https") or not parts.hostname))
        or not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", parts.path)
        or not (whole or given.startswith("/"))
        or ".." in parts.path.split("/")
    ):
        raise ConfigError(
            f"--base-url is {given!r}, it must be a path such as /class/ or an address such as "
            "https://uni.example/class/"
        )
    path = parts.path.rstrip("/") + "/"
    return (f"{parts.scheme}://{parts.netloc.lower()}" if whole else ""), path


def default_max_pages(model: str | None) -> int:
    """How many pages this machine's free memory holds, 2 to 200."""
    from cbviz.app import light

    page = LIGHT_PAGE_BYTES if model in ("sim", "tape") or (model is None and light.reason()) else PAGE_BYTES
    return max(2, min(200, int((light.free_bytes() - 0.5e9) / page)))


def explore(
    scenario: str | None = None,
    model: str | None = None,
    *,
    allow_code: bool = False,
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = True,
    query: Mapping[str, str] | None = None,
    token: str | None = None,
    base_url: str = "/",
    max_pages: int | None = None,
    extra: Sequence[str] = (),
) -> int:
    """Serves the explorer until Ctrl-C.

    Returns the exit status. Each page gets a kernel, and a session, of its own.

    `allow_code`: the page has a box whose Python runs in the page's kernel, with this user's rights: for
    oneself and for rooms one trusts. `token`: what an address must carry to be let in; None: a new one, '':
    none, on this machine alone and without `allow_code`. `base_url`: the path under which a proxy shows the
    server, or the proxy's whole address.

    Raises OSError if the port or host can't be used, ConfigError for another option.
    """
    from cbviz.app.server.guard import Guard

    public, path = split_base_url(base_url)
    guard = Guard(host, port or 0, path, public=public)
    if token is None:
        token = secrets.token_urlsafe(24)
    elif token:
        check_token(token)
    elif allow_code or not guard.alone:
        reason = (
            "--allow-code runs Python of whoever reaches the page"
            if allow_code
            else "others can reach this server"
        )
        raise ConfigError(
            f"--no-token is for a server that only this machine reaches, without --allow-code; here {reason}"
        )
    if max_pages is not None and max_pages < 1:
        raise ConfigError(f"--max-pages is {max_pages}, the least is 1")
    port = free_port(host, port)
    given = {
        k: v
        for k, v in {
            "CBVIZ_SCENARIO": resolved(scenario),
            "CBVIZ_MODEL": resolved(model),
            "CBVIZ_ALLOW_CODE": "1" if allow_code else "0",
            "CBVIZ_TOKEN": token,
        }.items()
        if v is not None
    }
    asked = {**({"token": token} if token else {}), **(query or {})}
    tail = path + ("?" + urllib.parse.urlencode(asked) if asked else "")
    with tempfile.TemporaryDirectory(
        prefix="cbviz-"
    ) as folder:  # one notebook alone: Voilà would list, and serve, whatever lies beside it
        page = Path(folder) / "explorer.ipynb"
        shutil.copyfile(notebooks() / "explorer.ipynb", page)
        command = explore_command(
            page,
            host,
            port,
            extra,
            base_url=path,
            public=public,
            max_pages=max_pages or default_max_pages(model),
        )
        return _serve(
            command, environment(**given), Announcement("The explorer", host, port, tail, public), browser
        )


def resolved(name: str | None) -> str | None:
    """A file or folder as an absolute path, since the server starts elsewhere; a name that cbviz knows as it
    is.
    """
    from cbviz.model import hub
    from cbviz.workload.presets import PRESETS

    if not name or name in ("sim", "tape", *hub.names(), *PRESETS) or not Path(name).exists():
        return name
    return str(Path(name).resolve())


def lab(
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = True,
    folder: str | Path | None = None,
    extra: Sequence[str] = (),
) -> int:
    """Opens JupyterLab on a copy of the notebooks in the working folder (`cbviz-notebooks`), or on `folder`,
    until Ctrl-C. Returns the exit status.
    """
    port = free_port(host, port)
    root = (Path(folder) if folder is not None else _own_copy()).resolve()
    command = [
        *python_command("jupyterlab"),
        f"--ServerApp.ip={host}",
        f"--ServerApp.port={port}",
        f"--ServerApp.root_dir={root}",
        "--ServerApp.log_level=WARN",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        *([] if browser else ["--no-browser"]),
        *extra,
    ]
    if (root / "explorer.ipynb").exists() and browser:
        command.append("--LabApp.default_url=/lab/tree/explorer.ipynb")
    return _serve(command, environment(), Announcement("JupyterLab", host, port, "/lab"), False)


def _own_copy() -> Path:
    """The checkout's notebooks themselves; of an installed package a copy that the user may write to, made
    once.
    """
    source = notebooks()
    if source.parent != APP:
        return source
    target = Path.cwd() / "cbviz-notebooks"
    target.mkdir(exist_ok=True)
    for f in source.rglob("*"):
        to = target / f.relative_to(source)
        if f.is_file() and not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(f, to)
    return target


@dataclass(frozen=True)
class Announcement:
    """Where a server is: what the terminal says, and what the browser opens."""

    what: str
    host: str
    port: int
    tail: str = "/"
    """Path and query of the link."""
    public: str = ""
    """Scheme and host of the proxy in front, if there is one."""

    @property
    def local(self) -> str:
        """The link for this machine's own browser."""
        from cbviz.app.server.guard import is_wildcard

        host = self.host if not is_wildcard(self.host) else "::1" if ":" in self.host else "127.0.0.1"
        return self._link(host)

    @property
    def lines(self) -> list[str]:
        """What the terminal says."""
        from cbviz.app.server.guard import is_loopback, is_wildcard

        told = [
            f"{self.what} is at {self.public + self.tail if self.public else self.local}   (Ctrl-C stops it)"
        ]
        if not is_loopback(self.host):
            links = (
                [self._link(a) for a in network_addresses(v6=":" in self.host)]
                if is_wildcard(self.host)
                else [self.local]
            )
            told.append("The network can reach it: whoever has the link can use it. There is no encryption.")
            told += [f"  For others: {link}" for link in links]
        return told

    def _link(self, host: str) -> str:
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{self.tail}"


def network_addresses(v6: bool) -> list[str]:
    """This machine's addresses on the network: IPv4, and IPv6 if `v6`, without those that mean something on
    one cable only.
    """
    import psutil

    found = [a for rows in psutil.net_if_addrs().values() for a in rows]
    four = [a.address for a in found if a.family == socket.AF_INET and not a.address.startswith("127.")]
    six = [
        a.address
        for a in found
        if a.family == socket.AF_INET6 and a.address != "::1" and not a.address.lower().startswith("fe80")
    ]
    return [*(six if v6 else []), *four]


def _serve(command: list[str], env: dict[str, str], where: Announcement, browser: bool) -> int:
    """Runs a server in an empty folder until it ends or Ctrl-C; both the server and its kernels are gone when
    this returns.
    """
    group: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else {}
    with tempfile.TemporaryDirectory(prefix="cbviz-cwd-") as neutral:
        process = subprocess.Popen(command, env=env, cwd=neutral, **group)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _interrupt)  # ended from outside: the server and its kernels go too
        try:
            if browser or where.what == "The explorer":
                threading.Thread(target=_announce, args=(process, where, browser), daemon=True).start()
            return process.wait()
        except KeyboardInterrupt:
            print(f"\n{where.what}: stopping", flush=True)
            return 0
        finally:
            _stop(process)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _announce(process: subprocess.Popen[bytes], where: Announcement, browser: bool) -> None:
    """Says where it is once it answers."""
    if wait_until_up(where.local, process):
        print("\n".join(where.lines), flush=True)
        if browser:
            webbrowser.open(where.public + where.tail if where.public else where.local)


def wait_until_up(url: str, process: subprocess.Popen[bytes] | None = None, timeout_s: float = 60.0) -> bool:
    """True once something listens at `url`; False if `process` ends before, or after `timeout_s`.

    Asks for no page: that would start a kernel.
    """
    where = urllib.parse.urlsplit(url)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and (process is None or process.poll() is None):
        try:
            socket.create_connection((where.hostname or "127.0.0.1", where.port or 80), timeout=5).close()
            return True
        except OSError:
            time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and lets it end its kernels."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
