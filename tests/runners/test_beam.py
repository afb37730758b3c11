"""Beam search says what transformers' beam search says: on a tiny random Llama, alone and in a pool so small
that beams lose their blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from cbviz import events as ev
from cbviz.config import EngineConfig
from cbviz.core.check import check
from cbviz.messages import RequestError, RequestSpec, Sampling
from cbviz.model.loader import load
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from cbviz.trace.accounting import check_trace
from cbviz.trace.explain import explain

PROMPTS = {"a": tuple(range(5, 15)), "b": tuple(range(30, 49)), "c": tuple(range(8, 11))}
NEW = 14
Judge = Callable[..., tuple[list[list[int]], list[float]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """transformers' model and ours from the same folder. Flat enough that beams mix."""
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    judge = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    judge.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CBVIZ_CACHE", str(tmp_path_factory.mktemp("cache")))
        return judge, load(str(folder))


@pytest.fixture(scope="module")
def expected(tiny: tuple[Any, Any]) -> Judge:
    def beams(
        prompt: tuple[int, ...], s: Sampling, eos: list[int], new: int = NEW
    ) -> tuple[list[list[int]], list[float]]:
        with torch.inference_mode():
            out = tiny[0].generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=s.beam_width,
                num_return_sequences=s.beam_width,
                do_sample=False,
                max_new_tokens=new,
                eos_token_id=eos or None,
                pad_token_id=0,
                length_penalty=s.length_penalty,
                early_stopping=s.early_stopping,
                return_dict_in_generate=True,
                output_scores=True,
            )
        found = []
        for row in out.sequences[:, len(prompt) :].tolist():
            end = next((i + 1 for i, t in enumerate(row) if t in eos), len(row))
            found.append(row[:end])
        return found, out.sequences_scores.tolist()

    return beams


@pytest.fixture(scope="module")
def eos(expected: Judge) -> list[int]:
    """Tokens that good continuations of all prompts hold, so that hypotheses finish early and late."""
    said = [expected(p, Sampling(beam_width=4), [])[0] for p in PROMPTS.values()]
    return sorted({2, *(x[i][j] for x in said for i, j in ((3, 4), (1, 8)))})


def session(tiny: tuple[Any, Any], specs: list[RequestSpec], **fields: Any) -> Session:
    config = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "precision": "exact",
        "clock": "measured",
        "discipline": "vllm",
        **fields,
    }
    return Session(specs, runner=TorchRunner(tiny[1], EngineConfig(**config)), **config)


def asked(rid: str, s: Sampling, eos: list[int], new: int = NEW) -> RequestSpec:
    return RequestSpec(
        rid,
        PROMPTS[rid],
        new,
        arrival_step=1,
        sampling=msgspec.structs.replace(s, stop_token_ids=tuple(eos), ignore_eos=True),
    )


def checked(s: Session) -> None:
    while s.step() is not None:
        check(s.engine.scheduler)
    check_trace(s.trace)
    assert s.engine.scheduler.state.pool.num_free == s.config.num_usable_blocks


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_hypotheses_are_those_of_transformers(
    tiny: tuple[Any, Any], expected: Judge, eos: list[int], penalty: float, early: bool
) -> None:
    lengths = set()
    for width in (2, 3, 4):
        how = Sampling(beam_width=width, length_penalty=penalty, early_stopping=early)
        s = session(tiny, [asked(rid, how, eos) for rid in PROMPTS], num_blocks=120, max_num_seqs=16)
        checked(s)
        for rid, ids in PROMPTS.items():
            tokens, scores = expected(ids, how, eos)
            assert s.outputs(rid) == tokens, f"{rid}, width {width}"
            assert s.scores(rid) == pytest.approx(scores, abs=1e-4)
            lengths |= {(len(x), x[-1] in eos) for x in tokens}
    assert any(ended for _, ended in lengths) and len(lengths) > 2, "no hypothesis ended early"


def test_without_an_end_of_sequence(tiny: tuple[Any, Any], expected: Judge) -> None:
    how = Sampling(beam_width=4)
    for new in (1, 2, NEW):
        s = session(tiny, [asked("a", how, [], new)])
        checked(s)
        assert s.outputs("a") == expected(PROMPTS["a"], how, [], new)[0]
    steps = [e for r in s.trace for e in r.events if isinstance(e, ev.BeamStep)]
    assert any(n != p for e in steps[1:] for n, p in enumerate(e.parents)), "no beam was dropped"
    assert any(isinstance(e, ev.Copied) for r in s.trace for e in r.events)
    said = [x for r in s.trace for x in explain(s.trace, r.step)]
    assert any(" goes on from " in x and "dropped" in x for x in map(str, said)) and any(
        "Beam search of a ended" in x for x in map(str, said)
    )


@pytest.mark.parametrize("caching", [False, True])
def test_the_same_where_beams_lose_their_blocks(
    tiny: tuple[Any, Any], expected: Judge, eos: list[int], caching: bool
) -> None:
    """Two beam searches and two others in a pool that holds one; another beam search is aborted.

    Beams wait for siblings, and a stall is broken.
    """
    how = Sampling(beam_width=3)
    specs = [
        RequestSpec("x", PROMPTS["b"], 40, arrival_step=1, sampling=Sampling(ignore_eos=True)),
        RequestSpec("y", PROMPTS["c"], 50, arrival_step=1, sampling=Sampling(ignore_eos=True)),
        asked("c", how, []),
        asked("b", how, []),
        asked("a", how, eos),
    ]
    s = session(
        tiny, specs, num_blocks=28, max_num_seqs=9, enable_prefix_caching=caching, max_num_batched_tokens=24
    )
    for step in range(200):
        if step == 9:
            s.abort("c.1" if "c.1" in s.request_ids else "c")
        if s.step() is None:
            break
        check(s.engine.scheduler)
    check_trace(s.trace)
    for rid in ("a", "b"):
        assert s.outputs(rid) == expected(PROMPTS[rid], how, eos if rid == "a" else [])[0]
    assert s.request("c").finish_reason == "abort" and s.request("x").finish_reason == "length"
    assert s.engine.scheduler.state.pool.num_free == 27
    lost = {e.request_id for r in s.trace for e in r.events if isinstance(e, ev.Preempted)}
    assert lost & {"a", "a.1", "a.2", "b", "b.1", "b.2"}
    outputs, digest = {i: s.request(i).output_token_ids for i in s.request_ids}, s.digest()
    s.rewind(s.trace.records[-1].step // 2)
    branch = s.fork()
    for x in (s, branch):
        x.run()
        assert {i: x.request(i).output_token_ids for i in x.request_ids} == outputs and x.digest() == digest


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_allocation": "contiguous", "enable_prefix_caching": False}, "kv_allocation is 'contiguous'"),
        ({"sliding_window": 8}, "sliding_window is 8"),
        ({"preemption_mode": "swap"}, "preemption_mode is 'swap'"),
        ({"speculative": "ngram"}, "speculative is 'ngram'"),
        ({"discipline": "static"}, "discipline is 'static'"),
        ({"discipline": "orca"}, "discipline is 'orca'"),
        ({"max_num_seqs": 2}, "there are 2 seats"),
        ({"num_blocks": 17}, "its beams may need 18 blocks"),
    ],
)
def test_what_can_not_be(tiny: tuple[Any, Any], fields: dict[str, Any], said: str) -> None:
    s = session(tiny, [], **fields)
    with pytest.raises(RequestError, match=said):
        s.engine.add(asked("a", Sampling(beam_width=3), []))
