"""What is wrong with settings, all of it at once: unknown fields, values out of their limits, names that
nothing registers. Knows no session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbviz.config import CONFIG_FIELDS, ConfigError, EngineConfig, check_value, name_problems, parse_value
from cbviz.core.policy import get_policy
from cbviz.core.speculative import get_proposer
from cbviz.cost import devices

_REGISTERED = {"policy": get_policy, "speculative": get_proposer, "modelled_device": devices.get}
"""Fields whose value is a name in a table that lies elsewhere."""


def parsed(texts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values of fields that are written as text (other values are taken as they are), and a sentence for
    each that is wrong.
    """
    problems = name_problems(texts)
    values: dict[str, Any] = {}
    for name, given in texts.items():
        if name not in CONFIG_FIELDS:
            continue
        try:
            value = parse_value(name, given) if isinstance(given, str) else given
            check_value(name, value)
            if name in _REGISTERED:
                _REGISTERED[name](value)
        except ConfigError as e:
            problems.append(str(e))
        else:
            values[name] = value
    return values, problems


def config_of(fields: Mapping[str, Any]) -> EngineConfig:
    """The configuration with these fields.

    Raises ConfigError that says everything that is wrong with them.
    """
    problems = name_problems(fields)
    for name, value in fields.items():
        if name in CONFIG_FIELDS:
            try:
                check_value(name, value)
                if name in _REGISTERED:
                    _REGISTERED[name](value)
            except ConfigError as e:
                problems.append(str(e))
    if problems:
        raise ConfigError("\n".join(problems))
    return EngineConfig(**fields)
