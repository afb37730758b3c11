"""Prompts made to hit another's blocks: what is found in the cache is always the longest common beginning, in
whole blocks, and nothing else.
"""

from __future__ import annotations

import random

import pytest

from cbviz import events as ev
from cbviz.messages import RequestSpec
from tests.core.byhand import found, run


def hits(prompts: list[tuple[int, ...]], **fields: int) -> dict[str, int]:
    """Tokens found in the cache by each prompt; they come one after another, when the last one has ended."""
    specs = [RequestSpec(f"p{i}", p, 1, arrival_step=1 + 2 * i) for i, p in enumerate(prompts)]
    t = run(specs, enable_prefix_caching=True, block_size=2, num_blocks=400, max_model_len=64, **fields)
    return {e.request_id: e.num_tokens for e in found(t, ev.PrefixHit)}


SECRET = (11, 12, 13, 14, 15, 16, 17)


@pytest.mark.parametrize(
    "attack, cached",
    [
        (SECRET, 6),
        ((*SECRET[:6], 99, 98), 6),
        ((11, 12, 13, 14, 99, 98, 97), 4),
        ((13, 14, 15, 16, 17), 0),  # its later blocks at the front
        ((12, 13, 14, 15, 16, 17), 0),  # cut at other places
        ((11, 12, 15, 16, 13, 14, 17), 2),  # its blocks in another order
        ((11, 12, 11, 12, 13, 14, 17), 2),  # its first block twice
        ((1112, 1314, 1516, 17), 0),
        ((11, 1213, 14, 1516, 17), 0),  # its digits
        ((11 + 256 * 12, 13 + 256 * 14, 15), 0),
        ((11, 0, 12, 0, 13, 0), 0),
        ((0, 11, 12, 13, 14, 15), 0),  # its bytes
        ((12, 11, 14, 13, 16, 15, 17), 0),  # the same sums and products
    ],
)
def test_an_attack(attack: tuple[int, ...], cached: int) -> None:
    assert hits([SECRET, attack]).get("p1", 0) == cached


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_is_the_longest_common_beginning(seed: int) -> None:
    """Prompts of two letters, so that most blocks come up again somewhere: found is what an earlier prompt
    begins with, in whole blocks, short of the last token.
    """
    rng = random.Random(seed)
    prompts = [tuple(rng.choice((0, 256)) for _ in range(rng.randint(1, 24))) for _ in range(30)]
    got = hits(prompts)
    for i, p in enumerate(prompts):
        common = max(
            (
                next((k for k, (x, y) in enumerate(zip(p, q)) if x != y), min(len(p), len(q)))
                for q in prompts[:i]
            ),
            default=0,
        )
        assert got.get(f"p{i}", 0) == min(common, len(p) - 1) // 2 * 2


def test_the_hashes_are_equal_from_run_to_run() -> None:
    """The record names the blocks by their hashes: golden values, so another process, another day and another
    machine give the same.
    """
    t = run([RequestSpec("a", SECRET, 1, arrival_step=1)], enable_prefix_caching=True, block_size=2)
    assert [e.hash for e in found(t, ev.BlockCached)] == GOLDEN
    windowed = run(
        [RequestSpec("a", SECRET, 1, arrival_step=1)],
        enable_prefix_caching=True,
        block_size=2,
        sliding_window=5,
    )
    assert not {e.hash for e in found(windowed, ev.BlockCached)} & set(
        GOLDEN
    )  # KV under another window is other KV


GOLDEN = ["b5bcd4591bfd43d5", "057a658e468748e4", "e5f09a2b8192c6fd"]
