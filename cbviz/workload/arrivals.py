"""When requests arrive: lists of seconds from a random generator. Knows nothing of what arrives."""

from __future__ import annotations

import math
import random

from cbviz.config import ConfigError

ARRIVALS = ("poisson", "uniform", "bursty", "at-once")


def poisson(num_requests: int, rate: float, rng: random.Random) -> list[float]:
    """Poisson arrivals at `rate` per second. The first arrival also has a random delay."""
    return bursty(num_requests, rate, rng, burstiness=1.0)


def uniform(num_requests: int, rate: float) -> list[float]:
    """One every 1 / rate seconds, the first at 0."""
    _check(num_requests, rate)
    return [i / rate for i in range(num_requests)]


def bursty(num_requests: int, rate: float, rng: random.Random, burstiness: float = 0.25) -> list[float]:
    """Gamma-distributed gaps of mean 1 / rate: shape `burstiness` 1 is Poisson, less comes in bursts, more is
    evener (`vllm bench serve --burstiness`).
    """
    _check(num_requests, rate)
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ConfigError(f"burstiness is {burstiness}, it must be a finite number above 0")
    now, times = 0.0, []
    for _ in range(num_requests):
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        times.append(now)
    return times


def draw(kind: str, num_requests: int, rate: float, rng: random.Random) -> list[float]:
    """Arrival times by the name of the process, one of ARRIVALS."""
    if kind == "poisson":
        return poisson(num_requests, rate, rng)
    if kind == "uniform":
        return uniform(num_requests, rate)
    if kind == "bursty":
        return bursty(num_requests, rate, rng)
    if kind == "at-once":
        _check(num_requests, rate)
        return [0.0] * num_requests
    raise ConfigError(f"arrivals is {kind!r}, it must be one of {', '.join(ARRIVALS)}")


def _check(num_requests: int, rate: float) -> None:
    if num_requests < 1:
        raise ConfigError(f"num_requests is {num_requests}, the least is 1")
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"rate is {rate}, it must be a finite number of requests a second above 0")


__all__ = ["ARRIVALS", "bursty", "draw", "poisson", "uniform"]
