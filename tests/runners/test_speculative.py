"""Speculative decoding on real decoders: whoever proposes, the tokens are those of a run without drafts,
greedy and sampled, whatever happens to the requests meanwhile.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import cbviz as cb
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.check import check
from cbviz.cost import devices, make
from cbviz.engine.engine import Engine
from cbviz.messages import RequestSpec, Sampling
from cbviz.model import hub, native
from cbviz.model.kv_store import chain_all
from cbviz.model.loader import LoadedModel, load
from cbviz.model.sampling import Draw, filtered_probs, num_accepted, sample
from cbviz.runners.torch_runner import TorchRunner
from cbviz.trace.accounting import check_record
from tests.runners.test_torch_runner import MODEL, VOCAB, random_model

PROPOSERS = ("ngram", "self-draft", "draft-model")
pytestmark = pytest.mark.usefixtures("one_thread")


def workload(seed: int, temperature: float) -> list[RequestSpec]:
    """Requests that begin alike, some of them repetitive, so that n-grams are found."""
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(12)]
    out = []
    for i in range(7):
        own = [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 6))] * rng.randint(1, 4)
        out.append(
            RequestSpec(
                f"r{i}",
                tuple((stem if rng.random() < 0.6 else []) + own),
                rng.randint(3, 18),
                arrival_step=rng.choice((1, 1, 2, 5, 9)),
                priority=rng.randint(0, 2),
                sampling=Sampling(
                    temperature=temperature,
                    seed=rng.choice((None, i)),
                    stop_token_ids=(5, 6),
                    ignore_eos=rng.random() < 0.5,
                ),
            )
        )
    return out


def run(
    specs: list[RequestSpec],
    aborts: dict[int, str],
    config: EngineConfig,
    draft: LoadedModel | None = None,
    model: LoadedModel = MODEL,
) -> tuple[dict[str, list[int]], list[Any]]:
    """Outputs of all requests, and the records; after each step all invariants, and the ledger against the
    tokens.
    """
    runner = TorchRunner(model, config, draft=draft)
    engine = Engine(config, runner, make("roofline", runner.spec, devices.get("NVIDIA H100 SXM")))
    engine.enqueue(specs)
    records, outputs = [], {}
    for step in range(1, 2000):
        if step in aborts and aborts[step] in engine.scheduler.state.requests:
            engine.abort(aborts[step])
        record = engine.step()
        if record is None:
            break
        check(engine.scheduler)
        check_record(record)
        records.append(record)
        for r in engine.scheduler.state.requests.values():
            outputs[r.request_id] = list(r.output_token_ids)
            for p, h in enumerate(chain_all(r.token_ids[: r.num_computed_tokens])):
                b = r.block_ids[p // config.block_size] if r.block_ids else 0
                assert not b or runner.kv.ledger[b, p % config.block_size] == h, (
                    f"step {step}: {r.request_id} position {p}"
                )
    said: dict[str, list[int]] = {}
    for record in records:
        for e in record.events:
            if type(e).__name__ == "Sampled":
                said.setdefault(e.request_id, []).extend(e.token_ids)
                assert record.logprobs is not None and len(record.logprobs[e.request_id]) >= len(e.token_ids)
    return said, records


@pytest.mark.parametrize("method", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_the_same_tokens_as_without(method: str, temperature: float, kernels: str) -> None:
    """Preemption, prefix hits and aborts included; tiny models, so nothing is near a tie and equality is
    exact.
    """
    accepted = preempted = hits = 0
    for seed in range(4 if kernels == "auto" else 1):
        specs = workload(seed, temperature)
        common: dict[str, Any] = {
            "num_blocks": 13,
            "block_size": 4,
            "max_model_len": 44,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
            "precision": "exact",
            "kernels": kernels,
            "clock": "modelled",
            "discipline": ("vllm", "chunked", "paged", "max-util")[seed],
            "policy": ("fcfs", "priority")[seed % 2],
        }
        if common["discipline"] in ("paged", "max-util"):
            common["max_num_batched_tokens"] = 44
        aborts = {6: "r2", 11: "r4"}
        plain, _ = run(specs, aborts, EngineConfig(**common))
        drafted, records = run(
            specs,
            aborts,
            EngineConfig(
                **common,
                speculative=method,
                num_speculative_tokens=3,
                draft_layers=2,
                draft_model="tiny",
                prompt_lookup_min=1,
            ),
            draft=MODEL,
        )
        gone = set(aborts.values())
        assert {i: t for i, t in plain.items() if i not in gone} == {
            i: t for i, t in drafted.items() if i not in gone
        }
        for i in gone & set(plain) & set(drafted):  # aborted at the same step, further on
            n = min(len(plain[i]), len(drafted[i]))
            assert plain[i][:n] == drafted[i][:n]
        for r in records:
            drafts = {c.request_id: c.num_draft for c in r.chunks}
            for e in r.events:
                kind = type(e).__name__
                preempted += kind == "Preempted"
                hits += kind == "PrefixHit"
                accepted += drafts[e.request_id] - e.num_rejected if kind == "Sampled" else 0
    if kernels == "auto":
        assert accepted > (0 if temperature and method == "ngram" else 5) and preempted > 2 and hits > 3, (
            accepted,
            preempted,
            hits,
        )


@pytest.mark.parametrize("method", ["self-draft", "draft-model"])
def test_under_a_sliding_window(method: str) -> None:
    model = random_model((0, 6, 6))
    specs = workload(1, 0.0)
    common: dict[str, Any] = {
        "num_blocks": 20,
        "block_size": 4,
        "max_model_len": 44,
        "max_num_seqs": 3,
        "precision": "exact",
        "clock": "modelled",
        "sliding_window": 9,
        "discipline": "vllm",
        "max_num_batched_tokens": 16,
    }
    plain, _ = run(specs, {}, EngineConfig(**common), model=model)
    drafted, _ = run(
        specs, {}, EngineConfig(**common, speculative=method, draft_model="x"), draft=model, model=model
    )
    assert plain == drafted


def test_a_model_that_drafts_for_itself_is_right() -> None:
    """The same model as its own draft model: every draft is accepted, so its store must hold what it should,
    also for prefixes that were hit and after a rewind.
    """
    specs = [
        RequestSpec(
            f"r{i}",
            tuple(range(10, 24)) + (30 + i,),
            16,
            arrival_step=1 + 4 * i,
            sampling=Sampling(ignore_eos=True, temperature=0.5 * (i % 2)),
        )
        for i in range(4)
    ]
    config = {
        "num_blocks": 40,
        "block_size": 4,
        "precision": "exact",
        "clock": "modelled",
        "discipline": "chunked",
        "max_num_batched_tokens": 9,
        "max_model_len": 60,
    }
    s = cb.Session(
        specs,
        runner=TorchRunner(
            MODEL, EngineConfig(**config, speculative="draft-model", draft_model="tiny"), draft=MODEL
        ),
        speculative="draft-model",  # type: ignore[arg-type]
        draft_model="tiny",
        **config,
    )  # type: ignore[arg-type]
    s.run()
    assert sum(r.tokens.rejected for r in s.trace) == 0
    steps, digest = len(s.trace), s.digest()
    s.rewind(5)
    s.run()
    assert len(s.trace) == steps and s.digest() == digest
    assert sum(r.tokens.rejected for r in s.trace) == 0


def test_rewind_and_fork_with_self_draft() -> None:
    specs = workload(2, 0.7)
    config = {
        "num_blocks": 14,
        "block_size": 4,
        "precision": "exact",
        "clock": "modelled",
        "discipline": "vllm",
        "max_num_batched_tokens": 20,
        "max_model_len": 44,
    }
    full = EngineConfig(**config, speculative="self-draft", draft_layers=2)  # type: ignore[arg-type]
    s = cb.Session(specs, runner=TorchRunner(MODEL, full), speculative="self-draft", draft_layers=2, **config)  # type: ignore[arg-type]
    s.run()
    end, steps = s.digest(), len(s.trace)
    texts = {i: s.request(i).output_token_ids for i in s.request_ids}
    for at in (3, steps // 2):
        s.rewind(at)
        s.run()
        assert s.digest() == end and len(s.trace) == steps
    s.rewind(4)
    b = s.fork(at=4, speculative="off")
    b.run()
    assert {i: b.request(i).output_token_ids for i in b.request_ids} == texts


# the rule ---------------------------------------------------------------------------------------------------


def toy(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two Markov chains over 6 tokens: rows of logits of the model, and of a drafting model that is not quite
    it.
    """
    g = torch.Generator().manual_seed(seed)
    p = torch.randn(6, 6, generator=g)
    return p, p + 0.8 * torch.randn(6, 6, generator=g)


@pytest.mark.parametrize("drafts", ["drawn", "fixed", "none"])
def test_drafts_leave_the_distribution_as_it_is(drafts: str) -> None:
    """Chi-square over all three-token outputs of a toy model: speculation with drafts of another model, with
    one fixed draft, and none.
    """
    p, q = toy(1)
    chances = p.double().softmax(-1)
    num, sampling = 1_200, Sampling(temperature=1.0)
    counts = np.zeros((6, 6, 6))
    num_right = num_checked = 0
    for n in range(num):
        rid, out = f"x{n}", [0]
        while len(out) < 4:
            k = 0 if drafts == "none" else 2
            guess: list[int] = []
            for j in range(k):
                at = len(out) + j
                guess.append(
                    3
                    if drafts == "fixed"
                    else sample(q[([*out, *guess])[-1]][None], [Draw(sampling, 5, rid, at)])[0].token_id
                )
            rows = torch.stack([p[t] for t in ([*out, *guess])[len(out) - 1 :]])
            mine = [
                s.token_id for s in sample(rows, [Draw(sampling, 5, rid, len(out) + j) for j in range(k + 1)])
            ]
            right = num_accepted(guess, mine)
            num_right, num_checked = num_right + right, num_checked + min(k, right + 1)
            out += mine[: right + 1]
        counts[tuple(out[1:4])] += 1
    expected = (
        np.array(
            [
                [[float(chances[0, a] * chances[a, b] * chances[b, c]) for c in range(6)] for b in range(6)]
                for a in range(6)
            ]
        )
        * num
    )
    big = expected >= 5
    chi2 = float((((counts - expected) ** 2) / expected)[big].sum()) + (
        counts[~big].sum() - expected[~big].sum()
    ) ** 2 / max(1e-9, expected[~big].sum())
    freedom = int(big.sum())
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5, (
        f"chi-square {chi2:.0f} at {freedom} degrees of freedom"
    )  # four standard deviations
    if drafts == "drawn":
        assert 0.15 < num_right / num_checked < 0.95
    elif drafts == "fixed":  # p(3), over where the chain is
        assert 0.02 < num_right / num_checked < 0.6


def test_a_fixed_draft_is_accepted_with_its_probability() -> None:
    """min(1, p/q) for a q that is all on one token; and what is drawn instead has p without it."""
    p, _ = toy(2)
    row, sampling, draft, num = p[4], Sampling(temperature=0.8, top_k=5), 2, 6000
    ids, probs = filtered_probs(row, sampling)
    chance = {int(i): float(x) for i, x in zip(ids, probs, strict=True)}
    got = [sample(row[None], [Draw(sampling, 0, f"y{n}", 9)])[0].token_id for n in range(num)]
    accepted = sum(num_accepted([draft], [t]) for t in got)
    assert accepted / num == pytest.approx(chance[draft], abs=4 * (chance[draft] / num) ** 0.5)
    others = [t for t in got if t != draft]
    for t, x in chance.items():
        if t != draft:
            want = x / (1 - chance[draft])
            assert others.count(t) / len(others) == pytest.approx(
                want, abs=4 * (want / len(others)) ** 0.5 + 1e-9
            )


def test_greedy_takes_the_best_and_stops_at_the_first_difference() -> None:
    assert [num_accepted(d, [4, 5, 6]) for d in ([4, 5], [4, 9], [9, 5], [-1, -1], [4, -1])] == [
        2,
        1,
        0,
        0,
        1,
    ]


# what is refused --------------------------------------------------------------------------------------------


def test_settings_that_do_not_fit_the_model() -> None:
    with pytest.raises(ConfigError, match=r"draft_layers is 3, the model has 3 layers.*at most 2"):
        TorchRunner(MODEL, EngineConfig(speculative="self-draft", draft_layers=3))
    other = LoadedModel(
        "o",
        "Other",
        MODEL.config.from_dict({**MODEL.config.to_dict(), "vocab_size": 50}),
        MODEL.weights,
        None,
        (3,),
    )
    with pytest.raises(
        ConfigError, match="draft_model 'Other' has a vocabulary of 50, the model 'Tiny' one of 61"
    ):
        TorchRunner(MODEL, EngineConfig(speculative="draft-model", draft_model="o"), draft=other)


def test_the_work_of_drafts_is_counted() -> None:
    config = EngineConfig(
        precision="exact",
        clock="modelled",
        speculative="self-draft",
        draft_layers=1,
        num_blocks=20,
        block_size=4,
        max_model_len=40,
        max_num_batched_tokens=64,
    )
    _, records = run([RequestSpec("r", (8, 9, 10), 6, sampling=Sampling(ignore_eos=True))], {}, config)
    c = records[0].counted
    assert (
        c is not None
        and 0 < c["draft_flops"] < c["flops"]
        and 0 < c["draft_weight_bytes"] < c["weight_bytes"]
    )
    runner = TorchRunner(MODEL, config)
    one = runner.decoder.first_layers(1)
    assert c["draft_weight_bytes"] == 3 * (one.layer_bytes + one.head_bytes + one.embed_row_bytes)


# the real model ---------------------------------------------------------------------------------------------

TEXTS = (
    "Repeat this line three times: the quick brown fox jumps over the lazy dog.",
    "List the numbers from one to ten, one a line.",
    "What is a cat?",
    "Write a sentence about the sea. Then write it again.",
)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load(hub.resolve("smollm2"))


@pytest.mark.slow
@pytest.mark.parametrize("method", PROPOSERS)
def test_the_real_model_says_the_same(smollm2: LoadedModel, method: str) -> None:
    """SmolLM2, exact, greedy, in a pool where requests are preempted, with shared prefixes and an abort:
    token for token what it says without drafts.
    """
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    common: dict[str, Any] = {
        "num_blocks": 10,
        "block_size": 16,
        "max_model_len": 120,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "precision": "exact",
        "discipline": "vllm",
    }
    outputs = []
    for extra in (
        {},
        {"speculative": method, "num_speculative_tokens": 3, "draft_layers": 10, "draft_model": "smollm2"},
    ):
        config = EngineConfig(**common, **extra)
        s = cb.Session(None, runner=TorchRunner(smollm2, config, draft=smollm2), **common, **extra)
        for i, text in enumerate(TEXTS):
            s.add(text, chat=True, max_tokens=28, request_id=f"r{i}")
        s.add(TEXTS[1], chat=True, max_tokens=40, request_id="gone")
        s.step(5)
        s.abort("gone")
        s.run()
        outputs.append({i: s.request(i).output_token_ids for i in s.request_ids if i != "gone"})
        preempted = sum(type(e).__name__ == "Preempted" for r in s.trace for e in r.events)
        assert preempted, "the pool was to be too small"
        for r in s.trace:
            check_record(r)
    assert outputs[0] == outputs[1]
    accepted = sum(c.num_draft for r in s.trace for c in r.chunks) - sum(r.tokens.rejected for r in s.trace)
    assert accepted > 3


def test_compiled_and_reference_are_both_there() -> None:
    assert native.library().lib is not None, "the compiled pass is what 'auto' was to test here"
