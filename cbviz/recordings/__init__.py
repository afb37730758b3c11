"""Small runs of the real model that come with the package, so that the explorer works where there is no room
for torch.

Owns their names, how they are read and how a session is made of one: the recorded requests, tokens and words,
scheduled anew by the live engine, so that every setting but the prompts can be changed. Knows no widget.
`python -m cbviz.recordings.make` makes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbviz.config import ConfigError
from cbviz.runners.tape import TapeRunner
from cbviz.session import Session, tape_runner
from cbviz.trace import Trace
from cbviz.trace import load as load_trace

FOLDER = Path(__file__).parent
NAMES = ("chat", "shared-prefix", "preemption")
"""The presets that were recorded, with their own settings and seed 0."""


def check(name: str) -> None:
    """Raises ConfigError if there is no such recording."""
    if name not in NAMES:
        raise ConfigError(
            f"scenario is {name!r}, of which there is no recording: it must be one of {', '.join(NAMES)}"
        )


def load(name: str) -> Trace:
    """The run of the real model, with the times that were measured then. Raises ConfigError."""
    check(name)
    return load_trace(FOLDER / f"{name}.jsonl.gz")


def runner(name: str) -> TapeRunner:
    """Answers the recorded requests with the recorded tokens. Raises ConfigError."""
    return tape_runner(load(name))


def open_session(name: str, *, autosave: Path | None = None, **config: Any) -> Session:
    """A live session on the recorded tokens.

    `config`: fields of EngineConfig that differ from the recording's; time is modelled. Raises ConfigError.
    """
    s = Session.from_tape(load(name), **config)
    s.notes.append(
        "Tokens and words were recorded from the real model; schedule and blocks are made now; time is "
        "modelled."
    )
    if config.get("seed"):
        s.notes.append(
            f"seed={config['seed']} does not change a recording's requests: they were drawn with seed 0."
        )
    s.trace.header.notes = list(s.notes)
    if autosave is not None:
        s.autosave(autosave)
    return s


__all__ = ["NAMES", "check", "load", "open_session", "runner"]
