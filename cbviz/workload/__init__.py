"""Workloads: who asks what, when.

`build` makes the requests of a preset or a file; `PRESETS` is the table of scenarios.
"""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from typing import Any

from cbviz.config import ConfigError, shown
from cbviz.messages import RequestSpec
from cbviz.textfile import is_file
from cbviz.workload import files
from cbviz.workload.presets import PRESETS, Preset, Source
from cbviz.workload.prompts import Encoder


def build(
    name_or_path: str | Path,
    *,
    seed: int = 0,
    model_vocab: int | None = None,
    tokenizer: Encoder | None = None,
    notes: list[str] | None = None,
    **params: Any,
) -> list[RequestSpec]:
    """The requests of a preset (by name) or of a file (by path), ids unique, in the order of arrival within a
    step.

    `model_vocab`: made-up ids stay below it, and a file's ids must. `tokenizer`: turns texts into the model's
    ids; None makes ids up. `params`: a preset's own (`PRESETS[name].params`), or `limit`, `scale` and
    `block_size` for a file. `notes` is given what a user should know, such as how many entries of a file were
    skipped. Raises ConfigError naming the parameter and its limit, RequestError for a bad line of a file.
    """
    check(name_or_path, **params)
    name = str(name_or_path)
    if name in PRESETS:
        return PRESETS[name].make(Source(seed, model_vocab, tokenizer), **params)
    return files.load(
        name_or_path, seed=seed, model_vocab=model_vocab, tokenizer=tokenizer, notes=notes, **params
    )


def check(name_or_path: str | Path, **params: Any) -> None:
    """Raises ConfigError if there is no such preset or file, or it has no such parameter: known before a
    model is loaded.
    """
    name = str(name_or_path)
    if name in PRESETS:
        _check(params, PRESETS[name].params, f"workload {name!r}")
        return
    if not is_file(name_or_path):
        near = difflib.get_close_matches(name, PRESETS, n=1)
        raise ConfigError(
            f"workload {name!r} is neither a preset nor a file"
            + (f"; did you mean {near[0]!r}?" if near else f"; presets: {', '.join(PRESETS)}")
        )
    known = {
        p.name: p.default
        for p in inspect.signature(files.load).parameters.values()
        if p.name in ("limit", "scale", "block_size")
    }
    _check(params, known, f"file {name!r}")


def _check(params: dict[str, Any], known: dict[str, Any], what: str) -> None:
    problems = []
    for key, value in params.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            problems.append(
                f"{what} has no parameter {key!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known)}")
            )
            continue
        kind = (
            (int, float)
            if isinstance(known[key], float)
            else (int, str)
            if key in ("prompt_len", "output_len")
            else str
            if isinstance(known[key], str)
            else int
        )
        if isinstance(value, bool) or not isinstance(value, kind):
            if value is not None or known[key] is not None:
                problems.append(
                    f"{what}: {key} must be "
                    f"{'a number' if kind == (int, float) else 'text' if kind is str else 'a whole number'}, "
                    f"got {shown(value)}"
                )
    if problems:
        raise ConfigError("\n".join(problems))


__all__ = ["PRESETS", "Preset", "build", "check"]
