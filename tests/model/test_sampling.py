"""The choice of a token: determinism, independence, and the distribution itself."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from cbviz.messages import Sampling
from cbviz.model import ops
from cbviz.model.hub import ModelError
from cbviz.model.sampling import Draw, filtered_probs, sample, uniform

WARM = Sampling(temperature=1.0)


def draw(sampling: Sampling, request_id: str = "r1", position: int = 0, seed: int = 0) -> Draw:
    return Draw(sampling, seed, request_id, position)


def test_greedy_takes_the_best_and_reports_it() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.5, -1.0], [7.0, 7.0, 0.0, 0.0]])
    first, second = sample(logits, [draw(Sampling()), draw(Sampling())])
    assert first.token_id == 1 and first.gap == pytest.approx(0.5)
    assert first.logprob == pytest.approx(3 - math.log(sum(math.exp(x) for x in (1, 3, 2.5, -1))), abs=1e-6)
    assert second.token_id == 0 and second.gap == 0.0
    assert sample(torch.empty(0, 4), []) == []


def test_a_draw_does_not_depend_on_batch_mates_or_order() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 200)
    draws = [
        draw(
            Sampling(temperature=0.5 + i % 3, top_k=i % 5 * 10, top_p=1.0 if i % 2 else 0.8),
            f"r{i % 7}",
            i // 7,
        )
        for i in range(40)
    ]
    together = sample(logits, draws)
    alone = [sample(logits[i : i + 1], [d])[0] for i, d in enumerate(draws)]
    assert [t.token_id for t in together] == [t.token_id for t in alone]
    order = list(range(39, -1, -1))
    assert [t.token_id for t in sample(logits[order], [draws[i] for i in order])] == [
        together[i].token_id for i in order
    ]


def test_seed_request_and_position_each_matter() -> None:
    numbers = {uniform(s, r, p) for s in range(5) for r in ("a", "b", "a1") for p in range(20)}
    assert len(numbers) == 300 and all(0 <= u < 1 for u in numbers)
    assert uniform(1, "a", 2) == uniform(1, "a", 2)
    assert uniform(1, "1", 12) != uniform(11, "", 12)
    assert abs(sum(uniform(0, "r", i) for i in range(4000)) / 4000 - 0.5) < 0.02


def test_frequencies_follow_the_probabilities() -> None:
    """Chi-square of 6,000 draws; the noise is a fixed function, so this passes always or never."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])
    for sampling in (
        WARM,
        Sampling(temperature=2.0),
        Sampling(temperature=0.7, top_k=3),
        Sampling(temperature=1.0, top_p=0.9),
    ):
        ids, probs = filtered_probs(logits, sampling)
        n = 6000
        got = Counter(
            t.token_id for t in sample(logits.expand(n, -1), [draw(sampling, position=i) for i in range(n)])
        )
        assert set(got) <= set(ids.tolist())
        chi = sum((got[i] - n * p) ** 2 / (n * p) for i, p in zip(ids.tolist(), probs.tolist(), strict=True))
        assert chi < 18.5, (sampling, got)  # 99.9 % of 4 degrees of freedom


def test_what_is_kept() -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()

    def kept(**s: float) -> list[int]:
        ids, probs = filtered_probs(logits, Sampling(**({"temperature": 1.0} | s)))  # type: ignore[arg-type]
        assert float(probs.sum()) == pytest.approx(1)
        return ids.tolist()

    assert kept() == [0, 2, 3, 1]
    assert kept(top_k=2) == [0, 2]
    assert kept(top_k=9) == [0, 2, 3, 1]
    assert kept(top_p=0.65) == [0, 2] and kept(top_p=0.75) == [0, 2, 3]
    assert kept(top_p=1e-9) == [0]
    assert kept(top_k=2, top_p=0.5) == [0]  # 0.4 of 0.7 already reaches a half
    assert kept(temperature=0.1, top_p=0.99) == [0, 2]


def test_logprob_and_gap_are_the_models_own() -> None:
    """Temperature and cuts change the choice, not what the model said."""
    logits = torch.tensor([[1.0, 0.5, 0.2]])
    own = logits.log_softmax(-1)[0]
    for position in range(10):
        (t,) = sample(logits, [draw(Sampling(temperature=3.0), position=position)])
        assert t.logprob == pytest.approx(float(own[t.token_id]), abs=1e-6) and t.gap == pytest.approx(0.5)


def test_cold_is_nearly_greedy() -> None:
    logits = torch.tensor([[1.0, 1.5, 1.2]])
    assert {
        sample(logits, [draw(Sampling(temperature=0.01), position=i)])[0].token_id for i in range(50)
    } == {1}


@pytest.mark.parametrize(
    "sampling", [Sampling(), WARM, Sampling(temperature=0.7, top_p=0.5), Sampling(temperature=0.7, top_k=3)]
)
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_logits_that_are_no_numbers_are_told(kernels: str, sampling: Sampling) -> None:
    logits = torch.randn(2, 40)
    logits[1] = torch.nan
    with pytest.raises(ModelError, match="r2: the logits for position 6 are no finite numbers"):
        sample(logits, [draw(sampling), draw(sampling, "r2", 6)], ops.pick(kernels, "cpu").choose)
