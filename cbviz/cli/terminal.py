"""Talking to the person at the terminal: one-line errors, a progress bar, Ctrl-C.

Knows no command and no engine.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from cbviz.config import ConfigError

BAR_AFTER_S = 2.0
"""Only what takes longer gets a progress bar."""
LINE_EVERY_S = 10.0
"""Where stderr is no terminal, a line this often stands for the bar."""
debug = False
"""Show tracebacks. Set once, by `main`."""


def plain_errors(f: Callable[..., None]) -> Callable[..., None]:
    """Known errors become one line on stderr and exit code 2, Ctrl-C exit code 130.

    Others are bugs and keep their traceback.
    """

    @functools.wraps(f)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            f(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            say("stopped")
            raise SystemExit(130) from None
        except BrokenPipeError:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # `| head` has seen enough; the interpreter's last flush must not complain
            raise SystemExit(0) from None
        except Exception as e:
            if debug or not isinstance(e, known_errors()):
                raise
            say(f"cbviz: {_one_line(e)}")
            raise SystemExit(2) from None

    return guarded


def known_errors() -> tuple[type[Exception], ...]:
    from cbviz.core.ranking import PolicyError
    from cbviz.core.replay import ReplayError
    from cbviz.messages import RequestError
    from cbviz.model.hub import ModelError
    from cbviz.runners.base import RunnerError
    from cbviz.runners.tape import TapeError
    from cbviz.session import Stuck
    from cbviz.trace.schema import TraceError

    return (
        ConfigError,
        RequestError,
        ModelError,
        TraceError,
        PolicyError,
        RunnerError,
        TapeError,
        ReplayError,
        Stuck,
        OSError,
        MemoryError,
    )


def _one_line(e: BaseException) -> str:
    if isinstance(e, OSError) and e.filename is not None:
        return f"{e.filename}: {e.strerror or e}"
    if isinstance(e, MemoryError):
        return "out of memory: choose a smaller workload or pool"
    lines = (
        str(e).splitlines() if isinstance(e, ConfigError) else [str(e)]
    )  # a ConfigError has a line for each thing that is wrong
    return "; ".join(filter(None, (" ".join(line.split()) for line in lines))) or type(e).__name__


def say(text: str) -> None:
    """A line for the person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, allow_nan=False, default=str))


class Bar:
    """Progress on stderr, from the third second on. `total` 0: how long it takes is not known."""

    def __init__(self, title: str, total: float = 0) -> None:
        self.title, self.total, self.done, self.note = title, total, 0.0, ""
        self._lock = threading.Lock()
        self._progress: Any = None
        self._task: Any = None
        self._told = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._timer = threading.Timer(BAR_AFTER_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Bar:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def _show(self) -> None:
        if not self._terminal:
            say(self._line())
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
        )
        with self._lock:
            if self._timer.finished.is_set():
                return
            # Four pictures a second: what is measured beside it should not notice.
            self._progress = Progress(
                *columns,
                console=Console(stderr=True),
                transient=True,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._progress.add_task(
                self.title, total=self.total or None, completed=self.done, note=self.note
            )
            self._progress.start()

    def _line(self) -> str:
        share = f" {100 * min(1.0, self.done / self.total):.0f} %" if self.total else ""
        return f"{self.title}{share}{', ' if self.note else ''}{self.note}"

    def update(self, done: float, total: float | None = None, note: str = "", title: str = "") -> None:
        self.done, self.note = done, note
        self.total = self.total if total is None else total
        self.title = title or self.title
        if self._progress is not None:
            self._progress.update(
                self._task, completed=done, total=self.total or None, note=note, description=self.title
            )
        elif not self._terminal and time.monotonic() - self._told > LINE_EVERY_S:
            self._told = time.monotonic()
            say(self._line())

    def download(self, done: int, total: int) -> None:
        """Progress of fetching a model, in bytes."""
        self.update(done, total, f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")


class Stop:
    """Handle Ctrl-C. The first lets the current step end.

    The second cancels the step, and the engine rolls it back.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
