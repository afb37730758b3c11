"""Plans built by hand, run through a real decoder: tokens, ledger, sync, counting, and what happens when
something fails.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cbviz.config import ConfigError, EngineConfig
from cbviz.messages import Chunk, RunnerOutput, Sampling, SchedulerOutput
from cbviz.model import hub
from cbviz.model.decoder import DecoderConfig, LayerWeights, Weights
from cbviz.model.hub import ModelError
from cbviz.model.kv_store import chain_all
from cbviz.model.loader import LoadedModel, load
from cbviz.runners.base import Runner, RunnerError
from cbviz.runners.torch_runner import TorchRunner

VOCAB = 61
pytestmark = pytest.mark.usefixtures("one_thread")


def random_model(windows: tuple[int, ...] = (0, 0, 0)) -> LoadedModel:
    """Three layers of random weights, no tokenizer."""
    c = DecoderConfig(
        architecture="llama",
        num_layers=3,
        hidden_size=24,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=32,
        vocab_size=VOCAB,
        max_context=256,
        rms_norm_eps=1e-5,
        windows=windows,
    )
    g = torch.Generator().manual_seed(1)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * (0.5 if len(shape) == 2 else 0.2) + (
            0 if len(shape) == 2 else 1
        )

    layers = [
        LayerWeights(w(24), w(c.q_size + 2 * c.kv_size, 24), w(24, c.q_size), w(24), w(64, 24), w(24, 32))
        for _ in range(3)
    ]
    embed = w(VOCAB, 24)
    return LoadedModel(
        "tiny", "Tiny", c, Weights(embed, layers, w(24), embed, c.inverse_frequencies()), None, (3,)
    )


MODEL = random_model()


def runner(model: LoadedModel = MODEL, **config: Any) -> TorchRunner:
    return TorchRunner(
        model, EngineConfig(**({"num_blocks": 64, "block_size": 4, "precision": "exact"} | config))
    )


class Seq:
    """A request as a scheduler would keep it."""

    def __init__(
        self, request_id: str, prompt: list[int], table: list[int], sampling: Sampling | None = None
    ) -> None:
        self.id, self.tokens, self.table, self.sampling = (
            request_id,
            list(prompt),
            list(table),
            sampling or Sampling(),
        )
        self.done = 0
        self.num_prompt = len(prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def chunk(self, budget: int = 10**6, sample: bool = True) -> Chunk:
        n = min(budget, len(self.tokens) - self.done)
        return Chunk(
            self.id,
            self.done,
            n,
            self.tokens,
            self.table,
            sample and self.done + n == len(self.tokens),
            self.sampling,
        )


def plan(*chunks: Chunk, padding: int = 0) -> SchedulerOutput:
    p = SchedulerOutput(0)
    p.chunks = list(chunks)
    p.num_padding_tokens = padding
    return p


def step(r: TorchRunner, seqs: list[Seq], budget: int = 10**6, padding: int = 0) -> RunnerOutput:
    """One step of everybody, then what a scheduler's update does."""
    p = plan(*(s.chunk(budget) for s in seqs), padding=padding)
    out = r.execute(p)
    for s, c in zip(seqs, p.chunks, strict=True):
        s.done += c.num_tokens
        s.tokens += out.token_ids.get(s.id, [])
    return out


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def alone(
    ids: list[int], num: int, sampling: Sampling | None = None, request_id: str = "a", **config: Any
) -> list[int]:
    r, s = runner(**config), Seq(request_id, ids, list(range(1, 40)), sampling)
    while len(s.output) < num:
        step(r, [s])
    return s.output


def test_it_is_a_runner() -> None:
    r = runner()
    assert isinstance(r, Runner)
    assert r.eos_token_ids == (3,) and r.tokenizer is None
    assert r.spec.name == "Tiny" and r.spec.weight_bytes_per_param == 4.0 and r.spec.params > 0


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_batches_chunks_and_padding_change_no_token(kernels: str, block_size: int) -> None:
    prompts = {f"r{i}": prompt(n, i) for i, n in enumerate((1, 3, 9, 17, 30))}
    r = runner(kernels=kernels, block_size=block_size, num_blocks=400)
    free = random.Random(0).sample(range(1, 400), 399)
    seqs = [
        Seq(i, p, [free.pop() for _ in range((len(p) + 13) // block_size + 1)]) for i, p in prompts.items()
    ]
    while any(len(s.output) < 12 for s in seqs):
        step(r, [s for s in seqs if len(s.output) < 12], budget=5, padding=3)
    for s in seqs:
        assert s.output == alone(prompts[s.id], 12), s.id
    assert len({tuple(s.output) for s in seqs}) == 5


def test_logprobs_and_gaps_come_with_the_tokens() -> None:
    r = runner()
    s = Seq("a", prompt(6), [1, 2, 3])
    out = step(r, [s])
    (lp,), (gap,) = out.logprobs["a"], out.gaps["a"]  # type: ignore[index]
    assert lp < 0 and gap > 0 and out.measured_s is not None and out.measured_s > 0
    silent = r.execute(plan(Chunk("a", 6, 1, s.tokens, s.table, False, Sampling())))
    assert silent.token_ids == {} and silent.logprobs == {} and silent.gaps == {}


def test_sampling_depends_on_seed_request_and_position_only() -> None:
    warm = Sampling(temperature=1.5, top_k=20, top_p=0.95)
    one = alone(prompt(5), 15, warm, "x")
    r = runner()
    mates = [
        Seq("x", prompt(5), [1, 2, 3, 4, 5, 6], warm),
        Seq("y", prompt(5), [7, 8, 9, 10, 11, 12], warm),
        Seq("z", prompt(11), [20, 21, 22, 23, 24, 25, 26], Sampling()),
    ]
    while len(mates[0].output) < 15:
        step(r, mates)
    assert mates[0].output == one
    assert mates[1].output != one  # the same prompt under another id draws differently
    assert alone(prompt(5), 15, warm, "x", seed=1) != one
    assert alone(prompt(5), 15, Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=0), "x", seed=1) == one


def test_a_block_computed_by_another_request_in_the_same_step_is_used() -> None:
    """vLLM lets a request hit blocks that its neighbour computes in this very step."""
    shared = prompt(8)
    r = runner()
    first, second = Seq("a", [*shared, 1, 2], [5, 9, 7]), Seq("b", [*shared, 4, 4, 4], [5, 9, 11])
    second.done = 8
    step(r, [first, second])
    later = Seq("c", [*shared, 4, 4, 4], [5, 9, 12])
    later.done = 8
    step(r, [later])
    assert second.output == alone([*shared, 4, 4, 4], 1) == later.output and first.output == alone(
        [*shared, 1, 2], 1
    )


def test_a_chunk_whose_past_was_never_computed_is_refused() -> None:
    r = runner()
    s = Seq("a", prompt(9), [5, 9, 7])
    s.done = 4
    with pytest.raises(
        RunnerError, match=r"a: the chunk starts at position 4, but the KV of position 3 \(block 5\)"
    ):
        step(r, [s])
    assert not r.kv.ledger.any()


@pytest.mark.parametrize(
    "chunk, said",
    [
        (Chunk("r", 0, 0, [1], [1], True, Sampling()), "request has 1 tokens"),
        (Chunk("r", 0, 2, [1], [1], True, Sampling()), r"positions 0\.\.1, the request has 1 tokens"),
        (Chunk("r", 0, 5, [1] * 5, [1], True, Sampling()), "position 4 lies behind its 1 blocks of 4"),
        (Chunk("r", 0, 1, [1], [0], True, Sampling()), "block 0 cannot be written"),
        (Chunk("r", 0, 1, [1], [64], True, Sampling()), r"block 64 cannot be written; blocks 1\.\.63 can"),
        (Chunk("r", 0, 1, [VOCAB], [1], True, Sampling()), f"token id {VOCAB} at position 0 is outside"),
        (
            Chunk("r", 0, 2, [1, 2], [1], True, Sampling(), num_draft=1, draft_token_ids=[2]),
            "1 draft tokens, 1 of them named, behind 1 of its 2 tokens",
        ),
    ],
)
def test_a_bad_chunk_is_refused_before_anything_is_computed(chunk: Chunk, said: str) -> None:
    r = runner()
    good = Seq("good", prompt(3), [1])
    with pytest.raises(RunnerError, match=said):
        r.execute(plan(good.chunk(), chunk))
    assert not r.kv.ledger.any() and not r.kv.layers[0].k.any()


def test_a_host_block_that_is_not_there_is_refused() -> None:
    p = plan()
    p.swaps_out = ((1, 999),)
    with pytest.raises(RunnerError, match="names host block 999; there are 256"):
        runner().execute(p)


def test_ledger_names_what_was_written() -> None:
    r = runner()
    s = Seq("a", prompt(7), [5, 9])
    step(r, [s], budget=3)
    assert [r.kv.hash_at(s.table, p) for p in range(8)] == [*chain_all(s.tokens[:3]), 0, 0, 0, 0, 0]
    step(r, [s], budget=4, padding=2)
    assert [r.kv.hash_at(s.table, p) for p in range(7)] == chain_all(s.tokens[:7])
    step(r, [s])
    assert r.kv.hash_at(s.table, 7) == chain_all(s.tokens[:8])[-1]
    assert int((r.kv.ledger != 0).sum()) == 8  # padding left no trace


@pytest.mark.parametrize("where", ["first layer", "last layer", "sampling"])
def test_a_pass_that_raises_leaves_no_false_claim(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    r = runner(kernels="reference")
    old, s = Seq("old", prompt(8, 1), [5, 9]), Seq("a", prompt(6), [6, 7])
    step(r, [old])
    calls = 0
    real = r.ops.attention

    def attention(*args: Any, **more: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if where != "sampling" and calls == (1 if where == "first layer" else 3):
            raise MemoryError("no memory")
        return real(*args, **more)

    def fail(*args: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(r.decoder, "ops", dataclasses.replace(r.ops, attention=attention))
        if where == "sampling":
            patch.setattr("cbviz.runners.torch_runner.sample", fail)
        # Block 5 is written over by the failing step: its old claim must go too.
        with pytest.raises(MemoryError):
            r.execute(plan(s.chunk(), Chunk("new", 0, 3, [9, 9, 9], [5], True, Sampling())))
    assert [r.kv.hash_at(s.table, p) for p in range(6)] == [0] * 6
    assert [r.kv.hash_at(old.table, p) for p in range(4)] == [0, 0, 0, chain_all(old.tokens[:4])[-1]]
    step(r, [s])
    assert s.output == alone(prompt(6), 1)


def test_copies_come_first() -> None:
    r = runner()
    s = Seq("a", prompt(6), [5, 9])
    step(r, [s])
    p = plan()
    p.copies = ((9, 20),)
    assert r.execute(p).token_ids == {}
    s.table[1] = 20
    r.kv.layers[0].k[9] = float("nan")
    while len(s.output) < 2:
        step(r, [s])
    assert s.output == alone(prompt(6), 2)


def test_an_empty_plan_is_nothing() -> None:
    r = runner()
    out = r.execute(plan())
    assert (
        out.token_ids == {}
        and out.measured_s is not None
        and out.counted == {"flops": 0.0, "weight_bytes": 0.0, "kv_bytes": 0.0}
    )


def test_padding_alone_is_computed() -> None:
    r = runner()
    out = r.execute(plan(padding=5))
    assert out.token_ids == {} and out.counted is not None and out.counted["flops"] > 0
    assert not r.kv.ledger.any() and not r.kv.layers[0].k.any()


def test_work_is_counted_from_shapes() -> None:
    r = runner()
    c = MODEL.config
    matmul = 3 * (24 * (c.q_size + 2 * c.kv_size) + 24 * c.q_size + 24 * 64 + 24 * 32)
    norms = 3 * 2 * 24 + 24
    per_token = 3 * 2 * 2 * 4 * 4  # layers, key and value, heads, head size, bytes
    s = Seq("a", prompt(10), [1, 2, 3, 4])
    out = step(r, [s], budget=6)
    assert out.counted == {
        "flops": 2 * matmul * 6 + 4 * 3 * c.q_size * 21,
        "weight_bytes": 4 * (matmul + norms + 24 * 6),
        "kv_bytes": per_token * (6 + 6),
    }
    out = step(r, [s])
    assert out.counted == {
        "flops": 2 * matmul * 4 + 2 * 24 * VOCAB + 4 * 3 * c.q_size * (7 + 8 + 9 + 10),
        "weight_bytes": 4 * (matmul + norms + 24 * 4 + 24 * VOCAB),
        "kv_bytes": per_token * (10 + 4),
    }
    out = step(r, [s], padding=2)
    assert (
        out.counted is not None
        and out.counted["flops"] == 2 * matmul * 3 + 2 * 24 * VOCAB + 4 * 3 * c.q_size * 11
        and out.counted["kv_bytes"] == per_token * 12
    )
    narrow = runner(sliding_window=3)
    s = Seq("a", prompt(10), [1, 2, 3])
    out = step(narrow, [s], budget=6)
    assert out.counted is not None and out.counted["flops"] == 2 * matmul * 6 + 4 * 3 * c.q_size * (
        1 + 2 + 3 * 4
    )
    out = step(narrow, [s])
    assert out.counted is not None and out.counted["kv_bytes"] == per_token * (4 + 2 + 4)


# sync


def fill(r: TorchRunner) -> dict[str, Seq]:
    seqs = {
        "a": Seq("a", prompt(10, 1), [1, 2, 3, 4]),
        "b": Seq("b", prompt(3, 2), [5, 6]),
        "c": Seq("c", [*prompt(10, 1)[:8], 7], [1, 2, 9, 10]),
    }
    step(r, [seqs["a"], seqs["b"]])
    seqs["c"].done = 8
    step(r, [seqs["c"]])
    return seqs


def wanted(seqs: dict[str, Seq]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    return {i: s.table for i, s in seqs.items()}, {i: s.tokens[: s.done] for i, s in seqs.items()}


def contents(r: TorchRunner, s: Seq) -> torch.Tensor:
    """Keys and values [L, 2, done, H_kv, D] of one sequence."""
    size = r.kv.block_size
    return torch.stack(
        [
            torch.stack([x[s.table[p // size], :, p % size] for p in range(s.done)])
            for layer in r.kv.layers
            for x in (layer.k, layer.v)
        ]
    )


def test_sync_of_what_is_there_computes_nothing() -> None:
    r = runner()
    seqs = fill(r)
    assert r.sync(*wanted(seqs)) == 0
    seqs["a"].done = 5  # an earlier state: the later slots of its blocks do no harm
    seqs["a"].tokens = seqs["a"].tokens[:5]
    assert r.sync(*wanted(seqs)) == 0


def test_sync_recomputes_only_what_differs() -> None:
    r = runner()
    seqs = fill(r)
    before = {i: contents(r, s).clone() for i, s in seqs.items()}
    other = Seq("x", prompt(9, 5), [2, 6, 20])  # takes a's and c's block 2, and b's unused block 6
    step(r, [other])
    calls: list[int] = []
    real = r.decoder.forward

    def forward(token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(len(token_ids))
        return real(token_ids, *args)

    r.decoder.forward = forward  # type: ignore[method-assign]
    assert r.sync(*wanted(seqs)) == 1
    assert sum(calls) == 4  # the shared block was computed once, its neighbours not at all
    for i, s in seqs.items():
        torch.testing.assert_close(contents(r, s), before[i], atol=1e-5, rtol=1e-5)
    assert r.sync(*wanted(seqs)) == 0


def test_sync_after_reset_restores_everything() -> None:
    r = runner()
    seqs = fill(r)
    before = {i: contents(r, s).clone() for i, s in seqs.items()}
    r.reset()
    for layer in r.kv.layers:
        layer.k.fill_(1e6)
        layer.v.fill_(1e6)
    assert r.sync(*wanted(seqs)) == 5  # a: 3 blocks, b: 1, c: 1 of its own
    for i, s in seqs.items():
        torch.testing.assert_close(contents(r, s), before[i], atol=1e-5, rtol=1e-5)
        while len(s.output) < 4:
            step(r, [s])
        assert s.output == alone(s.tokens[: s.num_prompt], 4)


def test_sync_of_a_long_sequence_takes_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbviz.runners.torch_runner._SYNC_TOKENS", 8)
    r = runner()
    s = Seq("a", prompt(50), list(range(1, 20)))
    step(r, [s])
    before = contents(r, s).clone()
    r.reset()
    assert r.sync({"a": s.table}, {"a": s.tokens[: s.done]}) == 13
    torch.testing.assert_close(contents(r, s), before, atol=1e-4, rtol=1e-4)


def test_sync_with_a_sliding_window_whose_old_blocks_are_gone() -> None:
    """A key inside the window depends, through the layers below, on tokens outside it: these must be computed
    again too, in memory of their own.
    """
    r = runner(sliding_window=5)
    s = Seq("a", prompt(30), list(range(1, 10)))
    step(r, [s])
    before = contents(r, s).clone()
    expected = alone(prompt(30), 3, sliding_window=5)
    s.table[:6] = [0] * 6
    r.kv.clear([7, 7], [1, 2])
    r.kv.layers[2].k[7] = 1e6
    assert r.sync({"a": s.table}, {"a": s.tokens[: s.done]}) == 1
    torch.testing.assert_close(contents(r, s)[:, 24:], before[:, 24:], atol=1e-5, rtol=1e-5)
    while len(s.output) < 3:
        step(r, [s])
    assert s.output == expected


def test_a_pass_of_sync_that_raises_leaves_no_false_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    r = runner()
    seqs = fill(r)
    step(r, [Seq("x", prompt(4, 5), [2])])

    def fail(*args: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(r.decoder, "forward", fail)
        with pytest.raises(MemoryError):
            r.sync(*wanted(seqs))
    assert not r.kv.ledger[2].any()
    assert r.sync(*wanted(seqs)) == 1


# configuration


@pytest.mark.parametrize(
    "field, value, kind, said",
    [
        ("precision", "half", ConfigError, "precision is 'half'"),
        ("kernels", "triton", ModelError, "kernels 'triton'"),
        ("device", "tpu", ConfigError, "device is 'tpu'"),
        ("device", "meta", ConfigError, "device is 'meta'"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(
    field: str, value: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        runner(**{field: value})


def test_cuda_without_a_card() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        runner(device="cuda")


# the real model


def play(
    r: TorchRunner, requests: list[dict[str, Any]], budget: int, seats: int
) -> list[tuple[list[int], list[float], list[float]]]:
    """Runs recorded requests with continuous batching, chunked prompts and a scattered pool.

    Returns each one's tokens, log-probabilities and gaps.
    """
    free = random.Random(1).sample(range(1, r.kv.num_blocks), r.kv.num_blocks - 1)
    waiting = list(enumerate(requests))
    results: list[Any] = [([], [], []) for _ in requests]
    running: list[tuple[int, Seq]] = []
    while waiting or running:
        while waiting and len(running) < seats:
            i, q = waiting.pop(0)
            need = (len(q["prompt_token_ids"]) + len(q["output_token_ids"])) // r.kv.block_size + 1
            running.append((i, Seq(f"r{i}", q["prompt_token_ids"], [free.pop() for _ in range(need)])))
        out = step(r, [s for _, s in running], budget=budget)
        for i, s in list(running):
            if s.id in out.token_ids:
                for values, new in zip(results[i], (out.token_ids, out.logprobs, out.gaps), strict=True):
                    values += new[s.id]  # type: ignore[index]
            if len(s.output) == len(requests[i]["output_token_ids"]):
                running.remove((i, s))
                free += s.table
    return results


def same_until_a_tie(got: list[int], recorded: dict[str, Any]) -> bool:
    """Equal up to the first position whose two best are closer than 0.001 nats."""
    for token, wanted_token, gap in zip(
        got, recorded["output_token_ids"], recorded["gap_to_second"], strict=True
    ):
        if gap < 0.001:
            return True
        if token != wanted_token:
            return False
    return True


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load(hub.resolve("smollm2"))


@pytest.fixture(scope="module")
def recorded(conformance: Path) -> list[dict[str, Any]]:
    return json.loads((conformance / "smollm2-greedy.json").read_text("utf-8"))["requests"]


@pytest.mark.model
def test_real_tokens_equal_the_recorded_ones(smollm2: LoadedModel, recorded: list[dict[str, Any]]) -> None:
    r = TorchRunner(smollm2, EngineConfig(precision="exact"))
    results = play(r, recorded, budget=23, seats=16)
    for q, (tokens, logprobs, gaps) in zip(recorded, results, strict=True):
        assert same_until_a_tie(tokens, q), q["text"]
        assert min(q["gap_to_second"]) > 0.001  # so the figures below belong to the same tokens
        assert logprobs == pytest.approx(q["logprobs"], abs=2e-4) and gaps == pytest.approx(
            q["gap_to_second"], abs=2e-4
        )
    ended = [q for q in recorded if q["output_token_ids"][-1] in r.eos_token_ids]
    assert len(ended) > 5


@pytest.mark.model
@pytest.mark.parametrize("kernels, block_size, budget", [("cpu", 7, 100), ("reference", 16, 100)])
def test_real_tokens_under_other_sizes_and_kernels(
    kernels: str, block_size: int, budget: int, smollm2: LoadedModel, recorded: list[dict[str, Any]]
) -> None:
    short = [
        q | {"output_token_ids": q["output_token_ids"][:6], "gap_to_second": q["gap_to_second"][:6]}
        for q in recorded[:4]
    ]
    r = TorchRunner(
        smollm2, EngineConfig(precision="exact", kernels=kernels, block_size=block_size, num_blocks=64)
    )
    for q, (tokens, _, _) in zip(short, play(r, short, budget=budget, seats=4), strict=True):
        assert same_until_a_tie(tokens, q), q["text"]


@pytest.mark.model
def test_measured_time_lies_inside_the_call(smollm2: LoadedModel) -> None:
    r = TorchRunner(smollm2, EngineConfig(num_blocks=8, precision="exact"))
    s = Seq("a", [1, 2, 3], [1, 2])
    t0 = time.perf_counter()
    out = step(r, [s])
    assert out.measured_s is not None and 0 < out.measured_s <= time.perf_counter() - t0
    assert out.counted is not None and out.counted["weight_bytes"] > 4 * 134_000_000
