"""Another engine in another interpreter, asked over pipes.

Knows how to find, start and end it; what is asked lies in `vllm_worker` and `engine_worker`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cbviz.bench import vllm_worker
from cbviz.config import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


class PeerError(ChildProcessError):
    """The worker ended, or vLLM raised. The message has its last words."""


def find_python(given: str | None) -> str | None:
    """The Python that has vLLM: the given one, else this one if it has, else None.

    Raises ConfigError if the given one is no file.
    """
    if given is not None:
        if not Path(given).is_file():
            raise ConfigError(
                f"vllm_python is {given!r}, there is no such file; give the path of a Python interpreter "
                "that has vLLM"
            )
        return given
    return sys.executable if importlib.util.find_spec("vllm") is not None else None


class Worker:
    """A script in another Python that answers lines of JSON. Use as a context manager, or close it."""

    def __init__(self, python: str, script: str, *args: str) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [python, script, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
        )

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """One question, one answer."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        try:
            pipe_in.write(json.dumps({"op": op, **fields}) + "\n")
            pipe_in.flush()
            line = pipe_out.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"the worker ended with {self._process.wait()}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        try:
            self._process.wait(timeout=5)  # its input has ended, so it ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class VllmPeer(Worker):
    """vLLM's scheduler. Starting takes as long as vLLM's import (10 to 40 seconds).

    Raises ConfigError if that Python has no vLLM that can be imported.
    """

    def __init__(self, python: str) -> None:
        super().__init__(python, vllm_worker.__file__)
        try:
            self.version = str(self.ask("hello")["vllm"])
        except PeerError as e:
            self.close()
            raise ConfigError(f"no vLLM can be imported by {python}: {e}") from e
        except BaseException:
            self.close()
            raise
