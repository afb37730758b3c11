"""Serves the explorer with Voilà, and the notebooks with JupyterLab. Owns the servers' settings; knows nothing of sessions.

Both run as child processes with our template and settings put in front of the user's search paths, so that nobody's own
configuration is replaced. Nothing is written into the user's folders, and no page loads anything from another host.
"""

from __future__ import annotations

import os
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
from pathlib import Path
from typing import Any

APP = Path(__file__).parent
JUPYTER = APP / "jupyter"
TEMPLATE = "cbviz"
CULL_IDLE_S = 120
"""A kernel whose page is gone for so long is shut down (an open page keeps its kernel)."""
CULL_EVERY_S = 30
DEFAULT_PORT = 8866


def configure_voila(c: Any) -> None:
    """Kernels go when their page is closed, and the kernel's websocket knows no delay. `c` is the traitlets config that is being loaded."""
    c.MappingKernelManager.cull_idle_timeout = CULL_IDLE_S
    c.MappingKernelManager.cull_interval = CULL_EVERY_S
    c.MappingKernelManager.cull_connected = False
    set_nodelay()
    hand_out_xsrf_cookie()


def hand_out_xsrf_cookie() -> None:
    """A page that is left asks Voilà to end its kernel, with a token from a cookie that Voilà itself never sets (and so answers 403)."""
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
    """Sends each message of a kernel at once: without it TCP holds small ones back for 40 ms (Nagle's algorithm against delayed acknowledgement)."""
    from jupyter_server.services.kernels.websocket import KernelWebsocketHandler as Handler

    if getattr(Handler, "_cbviz_nodelay", False):
        return
    before = Handler.open

    async def open(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.set_nodelay(True)
        return await before(self, *args, **kwargs)

    setattr(Handler, "open", open)  # noqa: B010  # a method of another library's class, replaced knowingly
    setattr(Handler, "_cbviz_nodelay", True)  # noqa: B010


def notebooks() -> Path:
    """The folder of notebooks: the checkout's, or the one inside the installed package."""
    for folder in (APP.parent.parent / "notebooks", APP / "notebooks"):
        if (folder / "explorer.ipynb").exists():
            return folder
    raise FileNotFoundError("explorer.ipynb is not where it should be: install cbviz again")


def free_port(host: str, wanted: int | None = None) -> int:
    """`wanted`, or a free port from 8866 on. Raises OSError naming the port if `wanted` is taken."""
    for port in [wanted] if wanted is not None else range(DEFAULT_PORT, DEFAULT_PORT + 100):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as s:
            if os.name == "posix":
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind((host, port))
                return port
            except OSError as e:
                if wanted is not None:
                    raise OSError(f"port {port} on {host} can't be used: {e.strerror or e}. Choose another with --port.") from None
    raise OSError(f"no free port from {DEFAULT_PORT} to {DEFAULT_PORT + 99} on {host}: name one with --port")


def environment(**more: str) -> dict[str, str]:
    """The environment of a server: ours, with our template and JupyterLab settings in front of the search paths."""
    env = dict(os.environ)
    for name, folder in (("JUPYTER_PATH", JUPYTER), ("JUPYTER_CONFIG_PATH", JUPYTER / "config")):
        env[name] = os.pathsep.join([str(folder), *filter(None, [env.get(name)])])
    return {**env, **more}


def explore_command(notebook: Path, host: str, port: int, extra: Sequence[str] = ()) -> list[str]:
    """Voilà on one notebook. Its settings file stands last in the list of folders, so that the user's own win."""
    from jupyter_core.paths import jupyter_config_path

    folders = [os.getcwd(), *jupyter_config_path(), str(JUPYTER / "config")]
    return [sys.executable, "-m", "voila", str(notebook), f"--port={port}", f"--Voila.ip={host}", "--no-browser", f"--template={TEMPLATE}",
            "--Voila.log_level=ERROR", "--show_tracebacks=True",
            *(f"--Voila.config_file_paths={f}" for f in folders), *extra]


def explore(scenario: str | None = None, model: str | None = None, *, allow_code: bool = False, host: str = "127.0.0.1", port: int | None = None, browser: bool = True,
            query: Mapping[str, str] | None = None, extra: Sequence[str] = ()) -> int:
    """Serves the explorer until Ctrl-C. Returns the exit status. Each page gets a kernel, and a session, of its own.

    `allow_code`: the page has a box whose Python runs in the page's kernel, with this user's rights: for oneself and for rooms one trusts.

    Raises OSError if the port can't be used.
    """
    port = free_port(host, port)
    given = {k: v for k, v in {"CBVIZ_SCENARIO": scenario, "CBVIZ_MODEL": model, "CBVIZ_ALLOW_CODE": "1" if allow_code else "0"}.items() if v is not None}
    with tempfile.TemporaryDirectory(prefix="cbviz-") as folder:  # one notebook alone: Voilà would list, and serve, whatever lies beside it
        page = Path(folder) / "explorer.ipynb"
        shutil.copyfile(notebooks() / "explorer.ipynb", page)
        url = _url(host, port) + ("?" + urllib.parse.urlencode(query) if query else "")
        return _serve(explore_command(page, host, port, extra), environment(**given), url, browser, "The explorer")


def lab(*, host: str = "127.0.0.1", port: int | None = None, browser: bool = True, folder: str | Path | None = None, extra: Sequence[str] = ()) -> int:
    """Opens JupyterLab on a copy of the notebooks in the working folder (`cbviz-notebooks`), or on `folder`, until Ctrl-C. Returns the exit status."""
    port = free_port(host, port)
    root = Path(folder) if folder is not None else _own_copy()
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.ip={host}", f"--ServerApp.port={port}", f"--ServerApp.root_dir={root}", "--ServerApp.log_level=WARN",
               "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", *([] if browser else ["--no-browser"]), *extra]
    if (root / "explorer.ipynb").exists() and browser:
        command.append("--LabApp.default_url=/lab/tree/explorer.ipynb")
    return _serve(command, environment(), _url(host, port) + "lab", False, "JupyterLab")


def _own_copy() -> Path:
    """The checkout's notebooks themselves; of an installed package a copy that the user may write to, made once."""
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


def _url(host: str, port: int) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/"


def _serve(command: list[str], env: dict[str, str], url: str, browser: bool, what: str) -> int:
    """Runs a server until it ends or Ctrl-C; both the server and its kernels are gone when this returns."""
    group: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else {}
    process = subprocess.Popen(command, env=env, **group)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)  # ended from outside: the server and its kernels go too
    try:
        if browser or what == "The explorer":
            threading.Thread(target=_announce, args=(process, url, browser, what), daemon=True).start()
        return process.wait()
    except KeyboardInterrupt:
        print(f"\n{what}: stopping", flush=True)
        return 0
    finally:
        _stop(process)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _announce(process: subprocess.Popen[bytes], url: str, browser: bool, what: str) -> None:
    """Says where it is once it answers."""
    if wait_until_up(url, process):
        print(f"{what} is at {url}   (Ctrl-C stops it)", flush=True)
        if browser:
            webbrowser.open(url)


def wait_until_up(url: str, process: subprocess.Popen[bytes] | None = None, timeout_s: float = 60.0) -> bool:
    """True once something listens at `url`; False if `process` ends before, or after `timeout_s`. Asks for no page: that would start a kernel."""
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
