"""What a link or a message of the page may ask for.

One list, by value, for both; what is not on it is refused.

Anybody who has a page's link can open it and send messages. Neither may make this machine open a file, fetch
a model or run code that its user did not name. So scenarios, models and every field that is text are compared
with names, and nothing is looked up on disk for the answer: a refusal reads the same whether or not a file of
that name exists. Python (a cell, `cb.Session`) is not asked: it is the user's own process.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from cbviz import checks
from cbviz.app.opening import SIM, TAPE, Settings
from cbviz.config import CONFIG_FIELDS, ConfigError, name_problems, whole_number
from cbviz.core.policy import POLICIES
from cbviz.core.speculative import PROPOSERS
from cbviz.cost import devices
from cbviz.model import hub
from cbviz.workload.presets import PRESETS

LAYOUTS = ("presenter",)
LINK_KEYS = ("scenario", "model", *CONFIG_FIELDS, "run", "step", "layout")
"""All that a link may hold."""
IGNORED = {
    "token": "Jupyter's password",
    "_xsrf": "Jupyter's guard against forged requests",
    "next": "where Jupyter goes on after a login",
    "redirects": "JupyterHub counts its redirections",
    "reset": "JupyterLab begins with a fresh workspace",
    "template": "Voilà's template",
    "theme": "Voilà's theme",
    "fbclid": "Facebook's mark on a link that was followed",
    "gclid": "Google's mark on a link that was followed",
    "msclkid": "Microsoft's mark on a link that was followed",
    "mc_cid": "a newsletter's mark on a link that was followed",
    "mc_eid": "a newsletter's mark on a link that was followed",
}
"""Keys that other software adds to addresses, each with its reason."""
IGNORED_PREFIXES = {"utm_": "marks of a campaign", "vscode": "an editor's built-in browser"}
MOST_CHARACTERS = 60
"""Of a value that is refused, so much is repeated."""


def installed() -> list[str]:
    """Models with a name of their own that lie on this machine."""
    return [m.name for m in hub.list_models() if m.path is not None]


@dataclass(frozen=True)
class Allowed:
    """`host`: what the user of this machine named, on the command line or in a cell.

    `alone`: only that user reaches the page, and may have a known model fetched.
    """

    host: Settings
    alone: bool = False

    def models(self) -> list[str]:
        """Names of models that a page may choose, the host's own left out."""
        return [*(hub.names() if self.alone else installed()), TAPE, SIM]

    def sift(self, settings: Settings, changes: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Of `changes` to `settings` those that are allowed and right, with their values, and a sentence for
        each of the others.
        """
        good: dict[str, Any] = {}
        problems: list[str] = []
        fields: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in ("scenario", "model") and (name not in _TEXTS or not isinstance(value, str)):
                fields[name] = value
                continue
            refused = self._refused(name, value, settings)
            if refused:
                problems.append(refused)
            elif name in CONFIG_FIELDS:
                fields[name] = value
            else:
                good[name] = value
        values, wrong = checks.parsed(fields)
        return {**good, **values}, [*problems, *wrong]

    def change(self, settings: Settings, changes: Mapping[str, Any]) -> Settings:
        """`settings` with `changes`. Raises ConfigError that says everything that is wrong with them."""
        good, problems = self.sift(settings, changes)
        if problems:
            raise ConfigError("\n".join(problems))
        return settings.changed(good)

    def values(self, settings: Settings, changes: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the config fields in `changes`.

        Raises ConfigError that says everything that is wrong with them.
        """
        good, problems = self.sift(settings, changes)
        if problems:
            raise ConfigError("\n".join(problems))
        return good

    def link(self, query: str) -> tuple[Settings, dict[str, str], list[str]]:
        """What the address asks for: settings, the place (`run`, `step`), and a sentence for each thing in it
        that is wrong and left out.
        """
        problems: list[str] = []
        given: dict[str, str] = {}
        for key, value in parse_qsl(query, keep_blank_values=True):
            if key in IGNORED or key.startswith(tuple(IGNORED_PREFIXES)):
                continue
            if key in given:
                problems.append(f"{key} is given twice; the last one counts")
            given[key] = value
        problems += name_problems((_clipped(k) for k in given if k not in LINK_KEYS), LINK_KEYS, "parameter")
        changes = {k: v for k, v in given.items() if k in ("scenario", "model") or k in CONFIG_FIELDS}
        good, wrong = self.sift(self.host, changes)
        problems += wrong
        place: dict[str, str] = {k: given[k] for k in ("run", "step") if k in given}
        if "step" in place and whole_number(place["step"]) is None:
            problems.append(f"step is {_clipped(place.pop('step'))!r}, it must be a whole number")
        if given.get("layout", LAYOUTS[0]) not in LAYOUTS:
            problems.append(_one_of("layout", given["layout"], LAYOUTS))
        settings = self.host.changed(good) if good else self.host.copy()
        return settings if "model" in good else settings.playable(), place, problems

    def _refused(self, name: str, value: Any, now: Settings) -> str:
        """Why the text field `name` may not have this value; '' if it may."""
        own: tuple[Any, Any]
        if name == "scenario":
            own, names = (self.host.scenario, now.scenario), ["", *PRESETS]
        elif name == "model":
            own, names = (self.host.model, now.model), self.models()
        else:
            own, names = (self.host.fields().get(name), now.fields().get(name)), list(_TEXTS[name](self))
        if not isinstance(value, str):
            return f"{name} must be text, got {str(value)[:MOST_CHARACTERS]}"
        return "" if value in names or value in own else _one_of(name, value, names)


_TEXTS: dict[str, Callable[[Allowed], Iterable[str]]] = {
    "policy": lambda allowed: POLICIES,
    "speculative": lambda allowed: ("off", *PROPOSERS),
    "draft_model": lambda allowed: ["", *(n for n in allowed.models() if n not in (SIM, TAPE))],
    "modelled_device": lambda allowed: devices.DEVICES,
    "device": lambda allowed: ("auto", "cpu", "cuda"),
}
"""Fields of the configuration that are text without a fixed list of choices, each with the names that a page
may choose.
"""


def unlisted() -> list[str]:
    """Text fields of the configuration that have neither choices nor a list here: there must be none."""
    return [
        n
        for n, f in CONFIG_FIELDS.items()
        if "str" in str(f.type) and not f.metadata["choices"] and n not in _TEXTS
    ]


def _one_of(name: str, value: str, names: Iterable[str]) -> str:
    names = [n for n in names if n]
    near = difflib.get_close_matches(value[:MOST_CHARACTERS], names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{name} is {_clipped(value)!r}, on a page it must be one of {', '.join(names)}{hint}"


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"
