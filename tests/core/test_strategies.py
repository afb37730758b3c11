"""What `tests.strategies` draws: the same run for the same seed, seldom one that is refused, and every
technique together with others.
"""

from __future__ import annotations

import random
from collections import Counter

from cbviz.config import ConfigError
from tests.strategies import draw

NUM = 400


def test_equal_seeds_draw_equal_runs() -> None:
    one, two = draw(random.Random(5)), draw(random.Random(5))
    assert one == two and one != draw(random.Random(6))


def test_at_most_one_in_ten_draws_is_refused() -> None:
    """A third would be too many to call the rest a test of anything; a handful is left in on purpose."""
    refused = 0
    for seed in range(NUM):
        try:
            draw(random.Random(seed)).session()
        except ConfigError:
            refused += 1
    assert 0 < refused < NUM / 10


def test_techniques_meet_each_other() -> None:
    """Of every pair of techniques that may go together, some draw has both."""
    met: Counter[tuple[str, str]] = Counter()
    for seed in range(NUM):
        drawn = draw(random.Random(seed))
        k = drawn.keywords
        has = {
            "swap": k["preemption_mode"] == "swap",
            "window": bool(k["sliding_window"]),
            "sinks": bool(k["attention_sinks"]),
            "contiguous": k["kv_allocation"] == "contiguous",
            "drafts": k["speculative"] != "off",
            "cache": k["enable_prefix_caching"],
            "threshold": bool(k["long_prefill_token_threshold"]),
            "beams": drawn.has_beams,
            "n": any(x.sampling.n > 1 for x in drawn.specs),
            "timeout": bool(k["timeout_s"]),
            "degrade": bool(k["degrade_above"]),
            "victim": k["victim"] is not None,
            "configure": any(op == "configure" for inputs in drawn.at.values() for op, _ in inputs),
            "codes": k["kv_cache_dtype"].startswith("int"),
        }
        met.update((a, b) for a in has for b in has if a < b and has[a] and has[b])
    never = {
        ("contiguous", "drafts"),
        ("contiguous", "sinks"),
        ("contiguous", "window"),
        ("sinks", "swap"),
        ("beams", "swap"),
        ("beams", "window"),
        ("beams", "sinks"),
        ("beams", "contiguous"),
        ("beams", "drafts"),
        ("contiguous", "n"),
    }
    names = sorted(has)
    assert [(a, b) for a in names for b in names if a < b and (a, b) not in never and met[a, b] < 3] == []
