"""How the explorer comes by a session: from its settings, from a recording, or again with other settings.

Knows no widget.

Owns `Settings` (what the user asked for, before anything is resolved) and the table of controls made from the
config's metadata. A recording of which no live engine can be made is shown through `Recording`, which only
looks back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from cbviz import recordings
from cbviz.config import CONFIG_FIELDS, ConfigError, check_names, parse_value
from cbviz.core.policy import POLICIES
from cbviz.core.replay import ReplayError
from cbviz.core.speculative import PROPOSERS
from cbviz.cost import devices, kv_types, models
from cbviz.disciplines import DISCIPLINES
from cbviz.messages import Sampling
from cbviz.model import hub
from cbviz.session import Session
from cbviz.trace import Cursor, Trace
from cbviz.workload.presets import PRESETS

SIM = "sim"
"""The name, in the list of models, of the simulator."""
TAPE = "tape"
"""The name, in the list of models, of recorded tokens (`cbviz.recordings`): real words without a model."""
OWN_REQUESTS = "requests"
"""The workload's name in the trace of a session that was given a list of requests."""
DEFAULT_SCENARIO = "chat"
ANSWERS_TEMPERATURE = 0.8
"""At which several answers to one prompt typed in the page are drawn."""

Progress = Callable[[float, str], None]
"""Called with the share done (0..1, or -1 if unknown) and what is being done."""

LABELS = {
    "scenario": "scenario",
    "model": "model",
    "discipline": "discipline",
    "policy": "policy",
    "max_num_seqs": "seats",
    "max_num_batched_tokens": "token budget",
    "num_blocks": "blocks",
    "block_size": "block size",
    "enable_prefix_caching": "prefix cache",
    "seed": "seed",
    "kv_cache_dtype": "KV type",
    "kv_cache_memory_bytes": "KV bytes",
    "sliding_window": "window",
    "attention_sinks": "sinks",
    "kv_allocation": "allocation",
    "preemption_mode": "preemption",
    "speculative": "speculation",
    "num_speculative_tokens": "drafts",
    "draft_layers": "draft layers",
    "draft_acceptance": "drafts right",
    "kernels": "kernels",
    "batch_invariant": "batch-invariant",
}
"""The controls, in order: the workload, the model, and fields of EngineConfig."""
GROUPS = {
    **dict.fromkeys(
        (
            "kv_cache_dtype",
            "kv_cache_memory_bytes",
            "sliding_window",
            "attention_sinks",
            "kv_allocation",
            "preemption_mode",
        ),
        "KV memory",
    ),
    **dict.fromkeys(
        (
            "speculative",
            "num_speculative_tokens",
            "draft_layers",
            "draft_acceptance",
            "kernels",
            "batch_invariant",
        ),
        "Decoding",
    ),
}
"""Controls that stand folded away under a title, until one of them differs from its default."""
_REAL = ("kernels", "batch_invariant")
"""Those that mean something only where numbers are really computed."""
_MADE_UP = ("draft_acceptance",)
"""And those that mean something only where they are not."""
_CLASSES = {n: f"cb-{n}" for n in ("scenario", "model", "discipline", "policy")}


@dataclass
class Settings:
    """What was asked for.

    `scenario`: a preset's name, a path, or '' (empty start). `model`: `sim`, `tape`, or what
    `Session(model=)` takes.
    """

    scenario: str = DEFAULT_SCENARIO
    model: str = "smollm2"
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig that differ from the scenario's own."""

    def fields(self) -> dict[str, Any]:
        """The fields of EngineConfig in force: the scenario's, then the user's."""
        preset = PRESETS.get(self.scenario)
        return {**(preset.settings if preset else {}), **self.config}

    def copy(self) -> Settings:
        return replace(self, config=dict(self.config))

    def playable(self) -> Settings:
        """These, or with the simulator where recorded tokens are the model and the scenario was not recorded."""
        return (
            replace(self, model=SIM) if self.model == TAPE and self.scenario not in recordings.NAMES else self
        )

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """With values as the page writes them (text, numbers, booleans).

        Another scenario brings its own settings. Raises ConfigError.
        """
        scenario = str(changes.get("scenario", self.scenario))
        new = Settings(
            scenario,
            str(changes.get("model", self.model)),
            {} if scenario != self.scenario else dict(self.config),
        )
        if scenario != self.scenario and "seed" in self.config:
            new.config["seed"] = self.config["seed"]
        for name, value in changes.items():
            if name not in ("scenario", "model"):
                new.config[name] = typed(name, value)
        return new


def typed(name: str, value: Any) -> Any:
    """A control's value as the config field `name` wants it.

    Raises ConfigError naming the field and the limit.
    """
    check_names({name: value})
    return parse_value(name, value) if isinstance(value, str) else value


def asked(m: Mapping[str, Any]) -> dict[str, Any]:
    """What the page says of a new request beside its prompt, as keywords of `Session.add`.

    Several answers are drawn (greedy ones would all be the same), or the best of a beam search of that width.
    Raises RequestError.
    """
    most, n = (
        int(v) if isinstance(v, float) and v.is_integer() else v for v in (m.get("max_tokens"), m.get("n", 1))
    )
    if m.get("beams") and n != 1:
        return {"max_tokens": most, "sampling": Sampling(beam_width=cast(int, n))}
    return {
        "max_tokens": most,
        "sampling": Sampling(n=cast(int, n), temperature=0.0 if n == 1 else ANSWERS_TEMPERATURE),
    }


# sessions ---------------------------------------------------------------------------------------------------


def open_session(settings: Settings, autosave: Path | None, progress: Progress) -> Session:
    """A session as asked for; downloads and loads the model if need be.

    Raises ConfigError, RequestError or ModelError.
    """
    if settings.scenario and settings.scenario not in PRESETS and not Path(settings.scenario).exists():
        raise ConfigError(
            f"scenario is {settings.scenario!r}, it must be one of {', '.join(PRESETS)} or a file of requests"
        )
    if settings.model == TAPE:
        return recordings.open_session(settings.scenario, autosave=autosave, **settings.fields())
    kind: dict[str, Any] = (
        {"runner": "sim"} if settings.model == SIM else {"runner": "torch", "model": settings.model}
    )
    if settings.model != SIM:
        progress(-1, f"Loading model {settings.model} …")

    def download(done: int, total: int) -> None:
        progress(
            done / total if total else -1,
            f"Downloading model {settings.model}: {done / 1e6:.0f} of {total / 1e6:.0f} MB",
        )

    return Session(
        settings.scenario or None, **kind, autosave=autosave, progress=download, **settings.fields()
    )


class Recording:
    """A trace without an engine, with the part of Session's interface that looks back.

    `why` says why it can't go on.
    """

    done = True
    runner = None
    tokenizer = None
    name = "recording"
    stopped_by = None

    def __init__(self, trace: Trace, why: str) -> None:
        self.trace = trace
        self.why = why
        self.cursor = trace.last
        self.notes = list(trace.header.notes)
        self.workload_name = trace.header.workload
        self.model = trace.header.model
        self.runner_name = trace.header.runner
        self.num_requests = trace.state().num_requests
        self.breakpoints: list[Any] = []
        self.watches: list[Any] = []
        self._listeners: list[Callable[[str], None]] = []

    def step(self, n: int = 1) -> None:
        return None

    def seek(self, step: int, event: int | None = None) -> None:
        self.trace.state(at := Cursor(step, event))
        self.cursor = at
        for f in list(self._listeners):
            f("seek")

    def on_change(self, f: Callable[[str], None]) -> Callable[[], None]:
        self._listeners.append(f)
        return lambda: self._listeners.remove(f) if f in self._listeners else None

    def close(self) -> None:
        self.trace.close()


Shown = Session | Recording


def reopen(trace: Trace, autosave: Path | None, progress: Progress) -> Shown:
    """A live session that stands where `trace` ends, or the recording itself where its steps do not come out
    again.
    """
    h = trace.header
    taped = h.runner == "tape" and h.workload in recordings.NAMES
    if h.runner not in ("sim", "torch") and not taped:
        return Recording(trace, f"it was made by {h.runner or h.producer}")
    try:
        if h.runner == "torch":
            progress(-1, f"Loading model {h.model} …")
        return Session.from_trace(
            trace,
            runner=recordings.runner(h.workload) if taped else None,
            autosave=autosave,
            progress=lambda done, total: progress(
                done / total if total else -1, f"Downloading model {h.model}"
            ),
        )
    except (ReplayError, ConfigError, hub.ModelError, ValueError, KeyError) as e:
        return Recording(trace, str(e))


def settings_of(shown: Shown) -> Settings:
    """The settings that would open `shown` again from its start."""
    h = shown.trace.header
    start = Settings(
        h.workload,
        h.runner
        if h.runner == SIM or (h.runner == TAPE and h.workload in recordings.NAMES)
        else h.model or "smollm2",
    )
    plain = start.fields()
    derived = ("max_model_len", "clock", *(("num_blocks",) if h.config.get("kv_cache_memory_bytes") else ()))
    for name in CONFIG_FIELDS:
        value = h.config.get(name)
        if (
            name not in derived
            and value is not None
            and value != plain.get(name, CONFIG_FIELDS[name].default)
        ):
            start.config[name] = value
    return start


# controls ---------------------------------------------------------------------------------------------------


def config_of(session: Session) -> dict[str, Any]:
    """The configuration that the next step will have: what waits to be taken is in it."""
    config = session.config.to_dict()
    for i in session.engine.inputs:
        if i["op"] == "configure":
            config.update(i["changes"])
    return config


def controls(settings: Settings, shown: Shown | None) -> list[dict[str, Any]]:
    """The controls with their present values, made from the config's metadata.

    Plain JSON for `static/controls.js`.
    """
    resolved: dict[str, Any] = (
        config_of(shown)
        if isinstance(shown, Session)
        else dict(shown.trace.header.config)
        if shown is not None
        else {}
    )
    asked = settings.fields()
    rows = []
    for name, label in LABELS.items():
        if (name in _REAL and settings.model in (SIM, TAPE)) or (
            name in _MADE_UP and settings.model not in (SIM, TAPE)
        ):
            continue
        row: dict[str, Any] = {"name": name, "label": label, "cls": _CLASSES.get(name)}
        if name == "scenario":
            taped = recordings.NAMES if settings.model == TAPE else ()
            options = [
                [p.name, f"{p.title} (recorded)" if p.name in taped else p.title, p.description]
                for p in PRESETS.values()
            ]
            options.append(["", "Empty: only your prompts", "No requests but the ones you type."])
            if settings.scenario and settings.scenario not in PRESETS:
                own = settings.scenario == OWN_REQUESTS
                title, help = (
                    ("This session's requests", "Requests made in Python.")
                    if own
                    else (Path(settings.scenario).name, "A file of requests.")
                )
                options.append([settings.scenario, title, help])
            row.update(
                kind="select", options=options, value=settings.scenario, live=False, help="What arrives when."
            )
        elif name == "model":
            options = [
                [m.name, m.title, f"The real model: {m.file_bytes / 1e6:.0f} MB of weights on this machine."]
                for m in hub.list_models()
            ]
            if settings.model not in (SIM, TAPE) and settings.model not in [o[0] for o in options]:
                options.append([settings.model, Path(settings.model).name, "A model of your own."])
            options.append(
                [
                    TAPE,
                    "Recorded tokens, no model",
                    (
                        "Words of the real model, recorded, under any schedule. For "
                        f"{', '.join(recordings.NAMES)}."
                    ),
                ]
            )
            options.append(
                [SIM, "Simulator, no model", "Made-up tokens and the modelled time of a large GPU."]
            )
            row.update(
                kind="select",
                options=options,
                value=settings.model,
                live=False,
                help="Who computes the tokens.",
            )
        else:
            default = CONFIG_FIELDS[name].default
            row.update(_knob(name, resolved.get(name, asked.get(name, default))))
            if name == "kv_cache_dtype":
                row.update(options=kv_options(settings, shown, row["options"]), noted=["int8", "int4"])
            if name in GROUPS:
                row.update(group=GROUPS[name], plain=row["value"] == default)
        rows.append(row)
    return rows


def kv_options(settings: Settings, shown: Shown | None, options: list[list[str]]) -> list[list[str]]:
    """The types of KV, each with what it saves and what it costs the model of `settings`."""
    spec = getattr(getattr(shown, "runner", None), "spec", None)
    if spec is None:
        with suppress(ConfigError):
            spec = models.get(settings.model)
    return [
        [
            value,
            text,
            kv_types.choice(settings.model, spec, value, computes=settings.model not in (SIM, TAPE)),
        ]
        for value, text, _ in options
    ]


def _knob(name: str, value: Any) -> dict[str, Any]:
    """A field of EngineConfig as a control."""
    f = CONFIG_FIELDS[name]
    meta = f.metadata
    row: dict[str, Any] = {
        "help": meta["help"],
        "live": bool(meta["live"]),
        "unit": meta["unit"],
        "value": value,
    }
    if name == "discipline":
        row.update(kind="select", options=[[d.name, d.title, d.summary] for d in DISCIPLINES.values()])
    elif name == "policy":
        row.update(kind="select", options=[[p.name, p.title, p.summary] for p in POLICIES.values()])
    elif name == "speculative":
        offered = [
            p for p in PROPOSERS.values() if p.name != "draft-model" or value == p.name
        ]  # a second model is named in Python or on the command line
        row.update(
            kind="select",
            options=[
                ["off", "off", "Every step gives a request one token."],
                *([p.name, p.title, p.summary] for p in offered),
            ],
        )
    elif name == "modelled_device":
        row.update(kind="select", options=[[d.name, d.name, d.source] for d in devices.DEVICES.values()])
    elif meta["choices"]:
        row.update(
            kind="select",
            options=[
                *([["", "as the discipline says", ""]] if "None" in str(f.type) else []),
                *([c, c, ""] for c in meta["choices"]),
            ],
        )
    elif "bool" in str(f.type):
        row.update(kind="bool")
    else:
        row.update(
            kind="int" if "int" in str(f.type) else "float",
            min=meta["min"],
            max=meta["max"],
            placeholder="not set" if "None" in str(f.type) else None,
        )
    return row


FORK_LABELS = {
    "discipline": "discipline",
    "policy": "policy",
    "victim": "victim",
    "max_num_seqs": "seats",
    "max_num_batched_tokens": "token budget",
    "num_blocks": "blocks",
    "kv_cache_dtype": "KV type",
    "modelled_device": "device (modelled)",
}
"""What a fork may change in the explorer, in order."""


def fork_fields(session: Session, at: int) -> list[dict[str, Any]]:
    """The fields of a fork at step `at`, with the values in force there; `open`: may be changed there.

    Plain JSON.
    """
    now = config_of(session) if at == len(session.trace) else session.trace.state(at).config
    rows = []
    for name, label in FORK_LABELS.items():
        if name == "modelled_device" and session.config.clock != "modelled":
            continue  # its time is measured here: another device would change no figure
        row = _knob(name, now.get(name, getattr(session.config, name)))
        rows.append(
            {
                "name": name,
                "label": label,
                "open": row["live"] or at == 0 or name in ("num_blocks", "modelled_device"),
                **row,
            }
        )
    return rows
