"""The trace file: JSON lines, primitives only, versioned.

Knows the format, not who produced it or who draws it.

Line 1 is the header. Then one line a step (`"type": "step"`, the fields of `messages.StepRecord`) and every
100 steps one keyframe (`"type": "keyframe"`: the control plane in full, with its digest). A program without
our classes can read it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cbviz.messages import RequestSpec, StepRecord

VERSION = 1
KEYFRAME_EVERY = 100

CAPABILITIES = (
    "schedule",
    "blocks",
    "tokens",
    "texts",
    "reasons",
    "accounting",
    "time",
    "cost",
    "queue",
    "gaps",
)
"""What a trace may hold. A view that needs one that the header lacks says which."""


class TraceHeader(msgspec.Struct, omit_defaults=True, tag_field="type", tag="header"):
    """What a reader must know before the first step."""

    version: int = VERSION
    producer: str = "cbviz"
    capabilities: list[str] = msgspec.field(default_factory=lambda: list(CAPABILITIES))
    config: dict[str, Any] = {}
    """The fields of EngineConfig at the first step."""
    model: str = ""
    runner: str = ""
    clock: str = "modelled"
    device: str = ""
    """Whose time the steps tell: a measured machine or a modelled device."""
    workload: str = ""
    """A preset's name, a file's, `requests` (a list), or empty."""
    workload_params: dict[str, Any] = {}
    requests: list[RequestSpec] = []
    """The workload itself, unless its name and parameters make it again."""
    inputs: list[dict[str, Any]] = []
    """What the user asked for after the last step; the next step would have taken it.

    As in `StepRecord.inputs`, but an added request stands there whole, as `spec`.
    """
    forked: dict[int, list[dict[str, Any]]] = {}
    """For each step at which this run branched off: the changes that made the branch, as in `inputs`."""
    tape: dict[str, list[int]] = {}
    """Of a taped run: the recorded output of each sequence, which may be longer than what this run has
    repeated of it so far.
    """
    tape_texts: dict[str, list[str]] = {}
    """Of a taped run: what each of these tokens added to the text."""
    created: str = ""
    block_size: int = 16
    num_blocks: int = 0
    peak_bytes_s: float = 0.0
    peak_flops_s: float = 0.0
    """Peaks of `device`, 0 if unknown; `peaks_measured` says whether they were measured."""
    peaks_measured: bool = False
    weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    notes: list[str] = []
    missing: dict[str, str] = {}
    """For a capability that is not there: why, in words."""


class Keyframe(msgspec.Struct, tag_field="type", tag="keyframe"):
    """The control plane after `step` steps, as plain data, and its digest."""

    step: int
    digest: str
    state: dict[str, Any]
    form: int = 1
    """Which form the digest has (`core.scheduler.DIGEST_FORM`): from 2 on it covers the order of the
    requests.
    """


class StepLine(StepRecord, tag_field="type", tag="step"):
    """A StepRecord as it stands in a file."""


Line = TraceHeader | StepLine | Keyframe
encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode


def decode_line(line: bytes) -> TraceHeader | StepLine | Keyframe:
    """One line of a trace. Raises msgspec.DecodeError for whatever is wrong with it."""
    try:
        return _decode(line)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply to be read") from None


class TraceError(ValueError):
    """A file is not a trace. The message names the file, the line and what is wrong."""
