"""How long prompts and outputs are: token counts from a random generator, described in a word (`64`,
`uniform:10:100`, `lognormal:200:1.0:4000`).
"""

from __future__ import annotations

import math
import random

from cbviz.config import ConfigError

MOST = 1_000_000


def uniform(num: int, low: int, high: int, rng: random.Random) -> list[int]:
    """Whole numbers, each from `low` to `high` inclusive equally likely."""
    _check("low", low)
    _check("high", high)
    if high < low:
        raise ConfigError(f"high is {high}, it must be at least low, {low}")
    return [rng.randint(low, high) for _ in range(num)]


def lognormal(num: int, median: float, sigma: float, high: int, rng: random.Random) -> list[int]:
    """Log-normal with the given median and spread, cut to 1..high: short ones are common, a few are long, as
    in real chat traces.
    """
    if not (math.isfinite(median) and median >= 1):
        raise ConfigError(f"median is {median}, the least is 1")
    if not (math.isfinite(sigma) and 0 <= sigma <= 10):
        raise ConfigError(f"sigma is {sigma}, it must lie in 0..10")
    _check("high", high)
    return [min(high, max(1, round(rng.lognormvariate(math.log(median), sigma)))) for _ in range(num)]


def draw(spec: int | str, num: int, rng: random.Random) -> list[int]:
    """`num` lengths: a number for all, `uniform:LOW:HIGH`, or `lognormal:MEDIAN:SIGMA:HIGH`."""
    kind, *args = str(spec).strip().split(":")
    try:
        if kind == "uniform" and len(args) == 2:
            return uniform(num, int(args[0]), int(args[1]), rng)
        if kind == "lognormal" and len(args) == 3:
            return lognormal(num, float(args[0]), float(args[1]), int(args[2]), rng)
        if not args:
            return [_check("length", int(kind))] * num
    except ConfigError:
        raise
    except ValueError:
        pass
    raise ConfigError(f"length is {spec!r}; write a number, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA:HIGH")


def _check(field: str, value: int) -> int:
    if not 1 <= value <= MOST:
        raise ConfigError(f"{field} is {value}, it must lie in 1..{MOST}")
    return value


__all__ = ["draw", "lognormal", "uniform"]
