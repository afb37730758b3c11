"""Arrival processes and lengths: means and limits of the draws."""

from __future__ import annotations

import random
import statistics

import pytest

from cbviz.config import ConfigError
from cbviz.workload import arrivals, lengths


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *times], times)]


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_bursty_keeps_its_rate_and_has_the_spread_of_its_shape(burstiness: float, spread: float) -> None:
    g = gaps(arrivals.bursty(20_000, 5.0, random.Random(0), burstiness))
    assert min(g) >= 0
    assert statistics.mean(g) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(g) / statistics.mean(g) == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("kind", arrivals.ARRIVALS)
def test_draws_are_sorted_and_repeat(kind: str) -> None:
    times = arrivals.draw(kind, 100, 3.0, random.Random(4))
    assert times == sorted(times) == arrivals.draw(kind, 100, 3.0, random.Random(4))
    assert len(times) == 100
    assert times[0] >= 0


def test_bad_arrivals() -> None:
    with pytest.raises(ConfigError, match="burstiness is 0"):
        arrivals.bursty(3, 1.0, random.Random(0), 0)
    with pytest.raises(ConfigError, match="num_requests is 0"):
        arrivals.uniform(0, 1.0)


def test_lengths() -> None:
    rng = random.Random(0)
    assert lengths.draw(" 7 ", 3, rng) == [7, 7, 7]
    drawn = lengths.draw("uniform:3:5", 500, rng)
    assert set(drawn) == {3, 4, 5}
    long = lengths.draw("lognormal:200:1.0:1000", 5000, rng)
    assert statistics.median(long) == pytest.approx(200, rel=0.1)
    assert max(long) == 1000
    assert min(long) >= 1


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "x",
        "uniform:5:3",
        "uniform:1",
        "uniform:a:b",
        "lognormal:0:1:9",
        "lognormal:5:nan:9",
        "lognormal:5:1:0",
        -3,
        "0",
    ],
)
def test_bad_lengths(spec: int | str) -> None:
    with pytest.raises(ConfigError, match=r"it must|the least|write a number"):
        lengths.draw(spec, 2, random.Random(0))
