"""How one field of the control plane is kept: a declaration drives undo, snapshot, restore and digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

REQUIRED: Any = object()
"""Stands for "no value": every snapshot has this field."""


@dataclass(frozen=True, slots=True)
class Field:
    """What is known about one attribute of `ControlState` or `Request`."""

    name: str
    undo: bool = False
    """`save` or `begin` keeps its value, and a rollback puts it back.

    False: whoever changes it notes how to take that back, or it never changes.
    """
    snapshot: bool = True
    """It decides the future, so it stands in a snapshot. False: it follows from other fields."""
    digest: bool = True
    """It stands in a snapshot and a digest covers it."""
    restore: bool = True
    """`from_plain` sets it. False: whoever makes the object gives it."""
    write: Callable[[Any], Any] | None = None
    """Value -> primitives; None: it is a primitive."""
    read: Callable[[Any], Any] | None = None
    """Primitives -> value."""
    older: Any = REQUIRED
    """What it is where an older snapshot lacks it."""
    sparse: bool = False
    """Left out of a snapshot where its value is `older`."""
    carried_from: Any = REQUIRED
    """Its value at the start of a run, if no event tells its changes: a record carries it where it differs."""


def undone(fields: Iterable[Field]) -> tuple[str, ...]:
    """Names of the fields that a rollback puts back."""
    return tuple(f.name for f in fields if f.undo)


def to_plain(x: object, fields: Iterable[Field]) -> dict[str, Any]:
    """The fields of `x` that decide its future, as primitives."""
    out: dict[str, Any] = {}
    for f in fields:
        if not f.snapshot:
            continue
        value = getattr(x, f.name)
        if f.sparse and value == f.older:
            continue
        out[f.name] = value if f.write is None else f.write(value)
    return out


def from_plain(x: object, fields: Iterable[Field], data: dict[str, Any]) -> None:
    """Sets the fields of `x` that `to_plain` wrote. Raises KeyError for one that must be there."""
    for f in fields:
        if not (f.snapshot and f.restore):
            continue
        value = data[f.name] if f.older is REQUIRED else data.get(f.name, f.older)
        setattr(x, f.name, value if f.read is None else f.read(value))
