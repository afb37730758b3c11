"""Batch invariance: what is promised holds to the bit, on operators, in the engine with everything switched
on, and on the real model. Where nothing is promised, the difference is found and shown where it begins.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbviz import views
from cbviz.config import ConfigError, EngineConfig
from cbviz.core.check import check
from cbviz.disciplines import DISCIPLINES
from cbviz.messages import RequestSpec, Sampling
from cbviz.model import cpu_ops, native, ops
from cbviz.model.divergence import by_row
from cbviz.model.loader import LoadedModel, load
from cbviz.model.rowwise import ROWWISE
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from cbviz.trace.alone import life, parts_of
from tests.conftest import torch_threads
from tests.model.test_precision import PRECISIONS, SHAPES, model, spread, tokens

PIECES = [[3, 1, 1, 30, 1, 5], [1], [1] * 4 + [50, 16], [33]]
needs_compiler = pytest.mark.skipif(
    native.library().lib is None, reason=f"no compiled kernels here: {native.library().about}"
)


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


# operators


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_row_by_row_nothing_depends_on_company_or_pieces(precision: str, shape: str) -> None:
    m = model(**SHAPES[shape])
    decoder = m.decoder(ROWWISE, 0, precision)
    assert decoder.batch_invariant
    sequences = [tokens(n, m.config.vocab_size, n) for n in (41, 1, 70, 33)]
    alone = [spread(decoder, precision, [s], [[len(s)]])[0] for s in sequences]
    together = spread(decoder, precision, sequences, PIECES, 7, num_padding=2)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe", "deepseek-v2-groups", "deepseek-v3"])
def test_row_by_row_with_experts_and_latents(name: str, tiny: Any, feed: Any) -> None:
    """And the compiled pass, which serves none of these, promises nothing for them: `auto` falls back."""
    m = tiny(name).ours
    decoder = m.decoder(ROWWISE)
    mine, others = tokens(30, 97, 1), [tokens(20 + i, 97, i) for i in range(2, 6)]
    (alone,) = feed(decoder, [mine], block_size=4, pieces=lambda rng: 30)
    assert torch.equal(
        feed(decoder, [mine, *others], block_size=4, pieces=lambda rng: rng.randint(1, 9), num_padding=3)[0],
        alone,
    )
    (theirs,) = feed(m.decoder(ops.REFERENCE), [mine], block_size=4, pieces=lambda rng: 30)
    torch.testing.assert_close(alone, theirs, atol=1e-4, rtol=1e-4)
    assert not m.decoder(ops.pick("cpu", "cpu")).batch_invariant
    assert TorchRunner(m, EngineConfig(num_blocks=8, batch_invariant=True)).ops.name == "row by row"


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_what_does_not_promise_it_does_not_keep_it(name: str) -> None:
    """Otherwise the tests above would show nothing."""
    m = model(**SHAPES["as SmolLM2"])
    decoder = m.decoder({"reference": ops.REFERENCE, "torch": cpu_ops.CPU}[name])
    assert not decoder.batch_invariant
    sequences = [tokens(n, m.config.vocab_size, n) for n in (41, 1, 70, 33)]
    alone = spread(decoder, "exact", sequences[:1], [[41]])[0]
    together = spread(decoder, "exact", sequences, PIECES)[0]
    assert not torch.equal(alone, together) and (alone - together).abs().max() < 1e-4


def test_row_by_row_equals_the_reference_but_for_rounding() -> None:
    for shape in SHAPES.values():
        m = model(**shape)
        sequence = tokens(50, m.config.vocab_size)
        want, got = (spread(m.decoder(o), "exact", [sequence], [[50]])[0] for o in (ops.REFERENCE, ROWWISE))
        assert (got - want).abs().max() < 2e-5 * want.abs().max()
    a, b = (o.choose(want) for o in (ops.REFERENCE, ROWWISE))
    assert a[0] == b[0] and a[1] == pytest.approx(b[1]) and a[2] == pytest.approx(b[2])


# who is asked for it


def test_which_operators_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()

    def runner(**fields: Any) -> TorchRunner:
        return TorchRunner(m, EngineConfig(num_blocks=16, **fields))

    assert runner(batch_invariant=True, kernels="reference").ops.name == "row by row"
    assert runner(kernels="reference").ops.name == "reference"
    if native.library().lib is not None:
        assert (
            runner(batch_invariant=True).ops.name
            == runner(batch_invariant=True, kernels="cpu").ops.name
            == runner().ops.name
            == "compiled"
        )
    monkeypatch.setattr(native, "library", lambda: native.Native(None, "no C compiler found"))
    assert runner(batch_invariant=True).ops.name == "row by row" and runner().ops.name == "torch"
    with pytest.raises(
        ConfigError,
        match=r"batch_invariant is on, but kernels 'cpu' are here torch .*no C compiler.*Set kernels to 'auto' or 'reference', or turn",
    ):
        runner(batch_invariant=True, kernels="cpu")


# the engine: whatever it does to a request


class Watching(TorchRunner):
    """Keeps the logits that each token was chosen from: by request, and the tokens before it, drafts among
    these.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def _forward(self, chunks: Any, num_padding: int) -> torch.Tensor:
        logits = super()._forward(chunks, num_padding)
        rows = iter(logits)
        for c in chunks:
            for back in range(c.num_draft if c.sample else -1, -1, -1):
                row, known = next(rows), c.start + c.num_tokens - c.num_draft
                key = c.request_id, (*c.tokens[:known], *(c.draft_token_ids or ())[: c.num_draft - back])
                assert key not in self.seen or torch.equal(self.seen[key], row), (
                    key
                )  # drawn again after a preemption: the same bits
                self.seen[key] = row.clone()
        return logits


def busy(
    m: LoadedModel, specs: list[RequestSpec], aborts: dict[int, str], **fields: Any
) -> tuple[Watching, Session]:
    """The engine with all of them, the invariants checked after every step, and somebody aborted on the way."""
    fields = {"batch_invariant": True, "clock": "modelled", **fields}
    r = Watching(m, EngineConfig(**fields))
    s = Session(specs, runner=r, **fields)
    while not s.done:
        if (rid := aborts.get(len(s.trace) + 1)) in s.request_ids and not s.request(str(rid)).finished:
            s.abort(str(rid))
        if s.step() is None:
            break
        check(s.engine.scheduler)
    return r, s


def as_alone(m: LoadedModel, specs: list[RequestSpec], r: Watching, s: Session, **fields: Any) -> int:
    """Every logit that `r` saw is what the request alone, its prompt whole, no cache, would have had.

    Returns how many rows were compared.
    """
    fields = {
        "batch_invariant": True,
        "clock": "modelled",
        **fields,
        "discipline": "orca",
        "enable_prefix_caching": False,
        "num_blocks": 64,
        "block_size": 16,
    }
    rows = 0
    for spec in specs:
        one = Watching(m, EngineConfig(**fields))
        by_itself = Session([spec], runner=one, **fields)
        by_itself.run()
        said = s.request(spec.request_id).output_token_ids
        for (rid, before), row in r.seen.items():
            if (rid, before) in one.seen:  # all but what was drawn behind a wrong draft, or beyond the end
                assert torch.equal(row, one.seen[rid, before]), (rid, len(before))
                rows += 1
        assert (
            said == by_itself.request(spec.request_id).output_token_ids[: len(said)]
        )  # shorter where it was aborted
    return rows


def requests(
    lengths: list[int], outputs: list[int], vocab: int, shared: int, warm: bool = False
) -> list[RequestSpec]:
    stem = tokens(shared, vocab, 99)
    return [
        RequestSpec(
            f"r{i}",
            (*stem, *tokens(n, vocab, i)),
            out,
            arrival_step=i // 2,
            sampling=Sampling(ignore_eos=True, temperature=0.8 if warm and i % 2 else 0.0),
        )
        for i, (n, out) in enumerate(zip(lengths, outputs, strict=True))
    ]


@pytest.mark.parametrize("kernels", ["reference", pytest.param("cpu", marks=needs_compiler)])
@settings(max_examples=15)
@given(data=st.data())
def test_preempted_cached_cut_and_aborted_a_request_has_the_logits_of_one_alone(
    kernels: str, data: Any
) -> None:
    m = model(windows=(0,))
    n = data.draw(st.integers(2, 5))
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=n, max_size=n))
    outputs = data.draw(st.lists(st.integers(1, 8), min_size=n, max_size=n))
    specs = requests(lengths, outputs, m.config.vocab_size, data.draw(st.sampled_from((0, 8, 13))), warm=True)
    size = data.draw(st.sampled_from((1, 4)))
    need = max(-(-(len(x.prompt_token_ids) + x.max_tokens) // size) for x in specs)
    fields: dict[str, Any] = {
        "discipline": data.draw(st.sampled_from(list(DISCIPLINES))),
        "policy": data.draw(st.sampled_from(("fcfs", "sjf", "lpm"))),
        "block_size": size,
        "num_blocks": need + 2 + data.draw(st.integers(0, need)),
        "max_num_seqs": 4,
        "kernels": kernels,
        "precision": data.draw(st.sampled_from(("exact", "fast"))),
        "preemption_mode": data.draw(st.sampled_from(("recompute", "swap"))),
    }
    if DISCIPLINES[fields["discipline"]].chunked:
        fields["max_num_batched_tokens"] = data.draw(st.sampled_from((5, 16)))
    store = {"kv_cache_dtype": data.draw(st.sampled_from(("auto", "auto", "int8", "int4")))}
    if data.draw(st.booleans()):
        store |= {
            "sliding_window": data.draw(st.integers(4, 20)),
            "attention_sinks": data.draw(st.sampled_from((0, 1, 5))),
            "preemption_mode": "recompute",
        }
    if not DISCIPLINES[fields["discipline"]].pad and data.draw(st.booleans()):
        fields |= {
            "speculative": "ngram",
            "num_speculative_tokens": data.draw(st.integers(1, 4)),
            "prompt_lookup_min": 1,
        }
    r, s = busy(m, specs, {data.draw(st.integers(2, 9)): "r1"}, **{**fields, **store})
    compared = as_alone(
        m,
        specs,
        r,
        s,
        kernels=kernels,
        precision=fields["precision"],
        max_num_seqs=1,
        **{**store, "preemption_mode": "recompute"},
    )
    assert 0 < compared <= len(r.seen) and (compared == len(r.seen) or "speculative" in fields)
    assert compared >= sum(len(x.output_token_ids) for x in s.state().by_index)


@needs_compiler
@pytest.mark.model
@pytest.mark.parametrize("discipline", ["static-padded", "chunked", "vllm"])
def test_on_the_real_model(discipline: str) -> None:
    """SmolLM2 in company with preemptions, prefix hits, chunks and an abort: each of its logits, 49,152 a
    token, equals that of the request alone.
    """
    m = load("smollm2")
    specs = requests([9, 14, 3, 20, 6], [14, 6, 16, 5, 12], 40_000, 32)
    fields: dict[str, Any] = {
        "discipline": discipline,
        "kernels": "cpu",
        "precision": "fast",
        "block_size": 8,
        "num_blocks": 12,
        "max_num_seqs": 5,
    }
    if DISCIPLINES[discipline].chunked:
        fields["max_num_batched_tokens"] = 24
    r, s = busy(m, specs, {12: "r1"}, **fields)
    assert as_alone(m, specs, r, s, kernels="cpu", precision="fast", max_num_seqs=1) == len(r.seen) > 30
    kinds = {type(e).__name__ for record in s.trace for e in record.events}
    assert "PrefixHit" in kinds
    if discipline != "static-padded":  # that reserves ahead, and need not
        assert "Preempted" in kinds, kinds


# the view: where a request's numbers differ from those it has alone


def company(m: LoadedModel, **fields: Any) -> Session:
    specs = requests([9, 14, 3, 20], [8, 6, 9, 5], m.config.vocab_size, 8)
    fields = {
        "clock": "modelled",
        "precision": "exact",
        "block_size": 4,
        "num_blocks": 60,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        **fields,
    }
    s = Session(specs, runner=TorchRunner(m, EngineConfig(**fields)), **fields)
    s.run()
    return s


@pytest.mark.parametrize(
    "fields",
    [
        {"kernels": "reference", "batch_invariant": True},
        {
            "kernels": "reference",
            "batch_invariant": True,
            "speculative": "ngram",
            "prompt_lookup_min": 1,
            "kv_cache_dtype": "int4",
        },
        pytest.param({"kernels": "cpu"}, marks=needs_compiler),
        pytest.param(
            {"kernels": "cpu", "precision": "fast", "num_blocks": 12, "discipline": "vllm"},
            marks=needs_compiler,
        ),
    ],
)
def test_where_it_is_promised_the_view_is_all_zeros(fields: dict[str, Any]) -> None:
    s = company(model(), **fields)
    before = s.digest()
    for rid in s.request_ids:
        found = s.alone(rid)
        held = ~np.isnan(found.keys)
        assert (
            found.equal and found.promised and not found.largest and not found.changed and found.first is None
        ), found.sentences()
        assert held.any() or "num_blocks" in fields
        assert (
            [t.said for t in found.tokens]
            == s.request(rid).output_token_ids
            == [t.alone for t in found.tokens]
        )
        assert all(t.apart == 0 and t.gap > 0 for t in found.tokens)
        assert f"{rid} alone is bit for bit {rid} among others" in found.sentences()[0]
    assert s.digest() == before


def test_where_it_is_not_promised_the_first_difference_is_named() -> None:
    m = model(**SHAPES["as SmolLM2"])
    s = company(m, kernels="reference")
    found = [s.alone(rid, step=4) for rid in s.request_ids]
    assert not any(f.promised or f.equal for f in found)
    for f in found:
        assert 0 < f.largest < 1e-3 and not f.changed and f.first is not None
        assert f.keys.shape == f.values.shape == f.ulps.shape == (2, sum(f.life.cuts[-1]))
        ops_seen = [d.op for d in f.inside.ops]
        assert ops_seen == [
            "norm",
            *(["qkv", "rotary", "attention", "o", "norm", "gate_up", "silu", "down", "norm"] * 2),
            "head",
        ]
        assert [d.layer for d in f.inside.ops] == [0] + [0] * 9 + [1] * 9 + [-1]
        assert f.inside.ops[0].largest == 0  # a row's norm of the embedding has the same input
        assert (
            f.inside.first is not None
            and f.inside.first.layer == 0
            and f.inside.first.op in ("qkv", "rotary", "attention", "o", "gate_up", "down")
        )
        assert f.inside.rows[0] > f.inside.rows[1] >= 1 and len(f.mates) >= 1 and f.step <= 4
        text = " ".join(f.sentences())
        assert (
            "says the same" in text and "The first that differs: layer 0" in text and "do not promise" in text
        )


def test_a_token_that_would_change_is_told() -> None:
    s = company(model(), kernels="reference")
    found = s.alone("r1")
    t = found.tokens[2]
    other = dataclasses.replace(
        found,
        tokens=[
            *found.tokens[:2],
            dataclasses.replace(t, alone=t.said + 1, gap=3e-6, text="so", text_alone="not so"),
            *found.tokens[3:],
        ],
    )
    assert other.changed == [other.tokens[2]] and not other.equal and other.closest == other.tokens[2]
    assert other.sentences()[0] == (
        f"Alone, r1 would say another token at position {t.position} (step {t.step}): 'not so' and not "
        "'so'. There the best led by only 3.0e-06 nats."
    )


def test_a_beam_is_not_held_against_what_it_would_say_alone() -> None:
    """Its tokens are not the best ones of its own."""
    fields: dict[str, Any] = {
        "clock": "modelled",
        "precision": "exact",
        "kernels": "reference",
        "num_blocks": 60,
        "max_num_seqs": 4,
    }
    s = Session(
        [RequestSpec("a", tuple(range(5, 15)), 6, sampling=Sampling(beam_width=3, ignore_eos=True))],
        runner=TorchRunner(model(), EngineConfig(**fields)),
        **fields,
    )
    s.run()
    for rid in ("a", "a.1"):
        found = s.alone(rid)
        assert not found.tokens and found.keys.shape[1] == 15
        text = found.sentences()
        assert (
            "another token" not in " ".join(text)
            and text[-1] == "Its tokens were chosen among beams: what it would say alone is not asked."
        )


def test_the_parts_of_a_life() -> None:
    """Prefix hits stand with step 0, chunks with theirs, and after a preemption the chunks that the cache
    holds now.
    """
    s = company(model(), kernels="reference", num_blocks=12, discipline="vllm")
    seen = set()
    for rid in s.request_ids:
        told = life(s.trace, rid)
        r = s.request(rid)
        assert (
            told.cuts[0][0] == 0
            and all(sum(a) == b[0] for a, b in zip(told.cuts, told.cuts[1:]))
            and sum(told.cuts[-1]) == r.num_computed_tokens
        )
        assert (
            list(told.places) == list(range(r.num_prompt_tokens, r.num_tokens))
            and len(told.table) * 4 >= r.num_computed_tokens
        )
        seen |= {0} & set(told.origin) | ({r.num_preemptions and -1})
        for step in {n for n in told.origin if n}:
            parts, which, ids = parts_of(s.trace, rid, step)
            assert ids[which] == rid and (parts[which][1], parts[which][2]) in told.cuts
            assert sum(n for _, _, n in parts) == s.trace.record(step).tokens.total
    assert {0, -1} <= seen
    with pytest.raises(ValueError, match="r0 computed nothing in step"):
        parts_of(s.trace, "r0", len(s.trace))
    with pytest.raises(KeyError):
        s.alone("nobody")
    sim = Session("article", runner="sim")
    sim.step()
    with pytest.raises(ConfigError, match="runner sim computes no numbers that could differ"):
        sim.alone("r0")


def test_units_in_the_last_place() -> None:
    a = torch.tensor([[1.0, 2.0, 3.0], [0.5, -0.25, 0.0]])
    b = a.clone()
    b[0, 1] += 2 * torch.finfo(torch.float32).eps
    largest, ulps = by_row(a, b)
    assert largest.tolist() == [2.0**-22, 0.0] and ulps.tolist() == [1.0, 0.0]
    half = a.half()
    other = half.clone()
    other[1, 0] += 2.0**-11
    assert by_row(half, other)[1].tolist() == [0.0, 1.0]
    assert by_row(torch.tensor([[float("nan"), float("inf")]]), torch.tensor([[float("nan"), float("inf")]]))[
        0
    ].tolist() == [0.0]


def test_the_picture_of_it() -> None:
    """Equal is one value that nothing else has; what is gone is empty; and it is valid plotly."""
    go = pytest.importorskip("plotly.graph_objects")
    for m, fields in (
        (model(**SHAPES["as SmolLM2"]), {"num_blocks": 60}),
        (model(), {"num_blocks": 12, "discipline": "vllm", "batch_invariant": True}),
    ):
        s = company(m, kernels="reference", **fields)
        for rid in s.request_ids:
            found = s.alone(rid)
            rows = views.alone_rows(found)
            assert (
                rows.shape == found.ulps.shape
                and ((rows == -6) == (found.ulps == 0)).all()
                and (np.isnan(rows) == np.isnan(found.ulps)).all()
            )
            figure = views.alone(found)
            go.Figure(figure)
            assert len(figure["data"]) == 2 and figure == json.loads(json.dumps(figure, allow_nan=False))
            assert (
                ("equal, bit for bit" in figure["layout"]["title"]["text"])
                == found.equal
                == ("batch_invariant" in fields)
            )


@pytest.mark.model
def test_a_session_says_what_keeps_the_promise() -> None:
    s = Session(None, batch_invariant=True, kernels="reference", num_blocks=8)
    assert (
        "batch_invariant is on: operators row by row (the reference one row at a time: batch-invariant, "
        "and slow)"
    ) in s.notes
