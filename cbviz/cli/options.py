"""What the options of `run` and `compare` mean: declared once, read once.

Opens the session they describe; runs nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cbviz import checks
from cbviz.cli.terminal import Bar, known_errors
from cbviz.config import CONFIG_FIELDS, ConfigError
from cbviz.disciplines import DISCIPLINES

if TYPE_CHECKING:
    from cbviz.session import Session

DEFAULT_MODEL = "smollm2"


Runner = Annotated[
    str,
    typer.Option(
        help=(
            "What makes the tokens: torch (the real model), sim (made up, modelled time), tape (those of a "
            "recording, given as --workload)."
        )
    ),
]
Workload = Annotated[str, typer.Option(help="A preset (article, chat, burst, ...) or a file of requests.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="A field of the configuration, e.g. max_num_seqs=4. Repeatable."
    ),
]
Params = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help=(
            "A parameter of the workload, e.g. num_requests=50; of a file: limit, scale or block_size. "
            "Repeatable."
        ),
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the workload and of sampling.")]
Model = Annotated[
    str | None,
    typer.Option(
        help=(
            "A known model, a folder, a GGUF file, a hub id; for sim, whose shape is priced. Default "
            f"{DEFAULT_MODEL}."
        ),
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Port; by default a free one from 8866 on.", show_default=False),
]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Don't open a browser.")]


def _pairs(given: Iterable[str], option: str) -> dict[str, str]:
    out = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{option} {text!r}: write {option} name=value")
        out[name.strip()] = value
    return out


def explicit_fields(
    sets: Sequence[str], discipline: str | None, policy: str | None, kernels: str | None = None
) -> dict[str, Any]:
    """Config fields that the user named, checked.

    Raises ConfigError that says all that is wrong: unknown fields, bad values, one named twice.
    """
    texts = _pairs(sets, "--set")
    for name, value in (("discipline", discipline), ("policy", policy), ("kernels", kernels)):
        if value is not None:
            if name in texts:
                raise ConfigError(f"{name} is given twice, by --{name} and by --set")
            texts[name] = value
    if "seed" in texts:
        raise ConfigError("seed has an option of its own: --seed, which holds for the workload too")
    fields, problems = checks.parsed(texts)
    if problems:
        raise ConfigError("\n".join(problems))
    checks.config_of(fields)
    return fields


def workload_params(given: Sequence[str]) -> dict[str, Any]:
    """Parameters of a workload: whole numbers and numbers are read as such."""
    out: dict[str, Any] = {}
    for name, value in _pairs(given, "--param").items():
        for kind in (int, float, str):
            try:
                out[name] = kind(value)
                break
            except ValueError:
                continue
    return out


def with_preset(workload: str, named: dict[str, Any]) -> dict[str, Any]:
    """The fields in force: those under which a preset shows its point, and over them what the user named.

    A preset's token budget is for chunked prefill; another discipline computes whole prompts, and would only
    have it raised.
    """
    from cbviz.workload import PRESETS

    preset = PRESETS.get(workload)
    suggested = {k: v for k, v in preset.settings.items() if k not in named} if preset else {}
    fields = {**suggested, **named}
    chunked = fields.get("enable_chunked_prefill")
    if (
        not (DISCIPLINES[fields.get("discipline", "chunked")].chunked if chunked is None else chunked)
        and "max_num_batched_tokens" in suggested
    ):
        del fields["max_num_batched_tokens"]
    return fields


def preset_note(workload: str, named: dict[str, Any]) -> str:
    """Which settings came from the preset and differ from the defaults."""
    taken = {
        k: v
        for k, v in with_preset(workload, named).items()
        if k not in named and v != CONFIG_FIELDS[k].default
    }
    return (
        (
            f"settings of the preset {workload!r}, unless --set says otherwise: "
            f"{', '.join(f'{k}={v}' for k, v in taken.items())}"
        )
        if taken
        else ""
    )


def open_session(
    runner: str,
    workload: str,
    model: str | None,
    seed: int,
    named: dict[str, Any],
    params: dict[str, Any],
    bar: Bar,
) -> Session:
    """The session that the options describe.

    Raises what is wrong with them, before a model is loaded where that can be told.
    """
    from cbviz.session import RUNNERS, Session
    from cbviz.trace.reading import CONTRADICTION, believed
    from cbviz.trace.trace import load

    if runner not in RUNNERS:
        near = difflib.get_close_matches(runner, RUNNERS, n=1)
        raise ConfigError(
            f"runner is {runner!r}, it must be one of {', '.join(RUNNERS)}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    if runner == "tape":
        if model is not None or params:
            raise ConfigError(
                f"{'--model' if model is not None else '--param'} does not go with --runner tape: model "
                "and requests are those of the recording"
            )
        if not Path(workload).is_file():
            raise ConfigError(
                "--runner tape runs a recording again under another schedule: --workload must be a trace "
                f"file, got {workload!r}"
            )
        trace = load(workload)
        return believed(
            lambda: Session.from_tape(trace, **named),
            f"{workload} cannot be run again: what it says {CONTRADICTION}",
            passing=known_errors(),
        )
    return Session(
        workload,
        runner=runner,
        model=model or DEFAULT_MODEL,
        seed=seed,
        workload_params=params,
        progress=bar.download,
        **with_preset(workload, named),
    )
