"""What codes and sinks cost in words, on models made here: the measures behind `cbviz bench techniques --only
kvquant` and `--only sinks`.
"""

from __future__ import annotations

import math

import pytest
import torch

from cbviz.bench import techniques
from cbviz.model import ops
from cbviz.model.ops import Batch
from cbviz.model.quality import kv_quality, surprise
from tests.model.test_precision import model, tokens

MODEL = model(hidden=64, heads=4, kv_heads=2, dim=16, inter=80, vocab=97, windows=(0, 0))
pytestmark = pytest.mark.usefixtures("one_thread")


def test_quality_of_numbers_and_of_codes() -> None:
    said = [(tokens(12, 97, i), tokens(30, 97, 50 + i)) for i in range(3)]
    same, half, eight, four = (kv_quality(MODEL, k, said) for k in ("float32", "float16", "int8", "int4"))
    assert (same.logprob_change, same.divergence, same.agreement, same.positions) == (0, 0, 1, 90)
    assert 0 < half.divergence < 1e-5 < eight.divergence < four.divergence < 1
    assert half.agreement >= eight.agreement >= four.agreement < 1
    assert [q.bytes_per_token for q in (same, half, eight, four)] == [2 * 2 * 2 * n for n in (64, 32, 18, 12)]
    d = MODEL.decoder(ops.REFERENCE)
    (prompt, rest), every = said[0], torch.arange(42)
    logits = d.forward(
        torch.tensor(prompt + rest),
        every,
        Batch.build([[0, 1, 2]], [42], [42], 16),
        MODEL.config.store(3, 16),
        every,
    ).log_softmax(-1)
    by_hand = sum(float(logits[11 + i, t]) for i, t in enumerate(rest)) / 30
    assert kv_quality(MODEL, "float32", said[:1]).logprob == pytest.approx(by_hand, abs=1e-4)


def test_surprise_goes_piece_by_piece_and_a_window_hides() -> None:
    text = tokens(600, 97, 3)
    full = surprise(MODEL, text)
    assert len(full) == 599 and float(full.mean()) > math.log(97) / 2
    short = surprise(MODEL, text[:100])
    torch.testing.assert_close(full[:99], short, atol=1e-4, rtol=1e-4)
    bare, sunk, all_of_it = (
        surprise(MODEL, text, window=40),
        surprise(MODEL, text, window=40, sinks=4),
        surprise(MODEL, text, window=40, sinks=560),
    )
    torch.testing.assert_close(bare[:39], full[:39], atol=1e-4, rtol=1e-4)
    assert (bare[60:] - full[60:]).abs().max() > 1e-3 and (bare[60:] - sunk[60:]).abs().max() > 1e-3
    torch.testing.assert_close(all_of_it, full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["kvquant", "sinks"])
def test_the_techniques_run(name: str) -> None:
    big = model(hidden=32, heads=4, kv_heads=2, dim=8, inter=40, vocab=30_000, windows=(0, 0))
    result = techniques.run([name], model=big, quick=True)
    assert result["holds"] and not result["failed"], result
    assert len(result["rows"]) >= 4 and name in result["titles"]
    if name == "kvquant":
        first = result["rows"][0]
        assert first["setting"] == "float16, 128 bytes a token" and first["benefit"]["value"] == 2.0
        pools = [r for r in result["rows"] if r["setting"].startswith("a pool of")]
        assert len(pools) == 2 and all("blocks against" in r["note"] for r in pools)
