"""The choice of tokens: equal to `model.sampling`, id for id."""

from __future__ import annotations

import random

import pytest
import torch
from cases.common import DEVICE, kernels

from cbviz.messages import Sampling
from cbviz.model import ops
from cbviz.model.sampling import Draw, sample, uniform


@pytest.mark.parametrize("vocab", [1, 2, 97, 4096, 9001])
def test_choose(vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(4, vocab).to(DEVICE) * 5
    logits[1] = logits[1].round()  # ties
    logits[2, : vocab // 2] = float("-inf")
    logits[3] = 1.5
    ids, leads, totals = kernels().choose(logits)
    want = ops.choose(logits)
    assert ids == want[0]
    assert leads == pytest.approx(want[1])
    assert totals == pytest.approx(want[2])


def test_ties_across_parts_go_to_the_smaller_id() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [8999, 4096, 4095]] = 3.0
    assert kernels().choose(logits.to(DEVICE))[0] == [4095]


def test_draw_equals_the_sampler() -> None:
    """Temperatures, top-k, top-p, ties and greedy rows in one batch."""
    rng = random.Random(0)
    torch.manual_seed(0)
    rows = []
    for i in range(60):
        s = Sampling(
            temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
            top_k=rng.choice([0, 1, 2, 5, 40, 500]),
            top_p=rng.choice([1.0, 0.9, 0.5, 0.05]),
            seed=i,
        )
        rows.append(Draw(s, i, f"r{i}", rng.randrange(100)))
    logits = torch.randn(len(rows), 97).to(DEVICE) * 2
    logits[::3] = logits[::3].round()
    want = [s.token_id for s in sample(logits, rows)]
    column = {
        name: torch.tensor([getattr(d.sampling, name) for d in rows], dtype=kind, device=DEVICE)
        for name, kind in (("temperature", torch.float64), ("top_k", torch.int64), ("top_p", torch.float64))
    }
    numbers = torch.tensor(
        [uniform(d.seed, d.request_id, d.position) for d in rows], dtype=torch.float64, device=DEVICE
    )
    draw = kernels().draw
    assert draw is not None
    assert draw(logits, column["temperature"], column["top_k"], column["top_p"], numbers).tolist() == want
    assert len(set(want)) > 30


def test_draw_goes_through_more_than_one_tile() -> None:
    torch.manual_seed(1)
    logits, n = torch.randn(1, 2500).to(DEVICE) * 0.1, 4
    rows = [Draw(Sampling(temperature=1.0, top_p=p, seed=i), i, "r", i) for i in range(n) for p in (1.0, 0.8)]
    want = [s.token_id for s in sample(logits.expand(len(rows), -1), rows)]
    one = torch.ones(len(rows), dtype=torch.float64, device=DEVICE)
    numbers = torch.tensor(
        [uniform(d.seed, d.request_id, d.position) for d in rows], dtype=torch.float64, device=DEVICE
    )
    tops = torch.tensor([d.sampling.top_p for d in rows], dtype=torch.float64, device=DEVICE)
    draw = kernels().draw
    assert draw is not None
    assert (
        draw(
            logits.expand(len(rows), -1),
            one,
            torch.zeros(len(rows), dtype=torch.int64, device=DEVICE),
            tops,
            numbers,
        ).tolist()
        == want
    )


@pytest.mark.filterwarnings(
    "ignore:All-NaN slice", "ignore:invalid value encountered"
)  # numpy, in the interpreter
def test_a_row_of_no_numbers_gives_an_id_of_the_row() -> None:
    """Whoever looks up that id's logit finds NaN and says so; an id outside the row would be an access
    outside it.
    """
    logits = torch.full((2, 5000), float("nan")).to(DEVICE)
    assert all(0 <= i < 5000 for i in kernels().choose(logits)[0])
    column = [
        torch.full((2,), x, dtype=kind, device=DEVICE)
        for x, kind in ((1.0, torch.float64), (0, torch.int64), (0.5, torch.float64), (0.3, torch.float64))
    ]
    draw = kernels().draw
    assert draw is not None
    assert all(0 <= i < 5000 for i in draw(logits, *column).tolist())
