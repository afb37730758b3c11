"""Every preset: reproducible, valid under its own settings, and able to show what its description promises."""

from __future__ import annotations

import random

import pytest

from cbviz.config import ConfigError, EngineConfig
from cbviz.workload import PRESETS, build, texts
from cbviz.workload.prompts import MadeUp, Message


class Letters:
    """A tokenizer of letters: what a preset gives to a real one, and in what form."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def chat(self, messages: list[Message]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


def need(spec_len: int, max_tokens: int, block_size: int) -> int:
    return -(-(spec_len + max_tokens) // block_size)


def test_article_is_the_articles_draw() -> None:
    specs = build("article")
    rng = random.Random(42)
    assert [(len(s.prompt_token_ids), s.max_tokens) for s in specs] == [
        (rng.randint(10, 100), rng.randint(20, 200)) for _ in range(20)
    ]
    word = random.Random(7)
    assert [s.prompt_token_ids for s in specs] == [
        tuple(word.randint(100, 40000) for _ in s.prompt_token_ids) for s in specs
    ]
    assert sum(s.max_tokens for s in specs) == 2160
    assert all(s.output_len == s.max_tokens and s.sampling.ignore_eos and s.arrival_step == 0 for s in specs)
    assert build("article", seed=5) == specs == build("article", model_vocab=49152)


def test_article_fits_a_small_vocabulary() -> None:
    for vocab in (2, 100, 300, 32000):
        assert all(0 <= t < vocab for s in build("article", model_vocab=vocab) for t in s.prompt_token_ids)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_reproducible(name: str) -> None:
    preset = PRESETS[name]
    specs = build(name, seed=3)
    assert specs == build(name, seed=3)
    assert len({s.request_id for s in specs}) == len(specs)
    config, _ = EngineConfig(**preset.settings).resolve(8192)
    assert config.max_model_len is not None
    assert all(len(s.prompt_token_ids) + s.max_tokens <= config.max_model_len for s in specs)
    assert all(s.output_len == s.max_tokens for s in specs)
    assert preset.title
    assert preset.description.count(".") == 1
    assert all(0 <= t < 512 for s in build(name, model_vocab=512) for t in s.prompt_token_ids)
    if name != "random":
        assert 7 <= len(specs) <= 20
        steps = [s.arrival_step for s in specs]
        assert None not in steps
        assert steps == sorted(steps, key=lambda s: s or 0)


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"article"}))
def test_the_seed_changes_the_draw(name: str) -> None:
    assert build(name, seed=1) != build(name, seed=2)


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"article", "random"}))
def test_texts_go_through_the_tokenizers_template(name: str) -> None:
    for spec in build(name, tokenizer=Letters()):
        text = "".join(map(chr, spec.prompt_token_ids))
        assert spec.prompt is not None
        assert text.endswith(f"<user>{spec.prompt}")


def test_chat_has_varied_prompts() -> None:
    assert len(set(texts.CHAT)) == len(texts.CHAT) >= 16
    assert len({s.prompt for s in build("chat", seed=11)}) == 16


def test_a_burst_is_quiet_then_full() -> None:
    steps = [s.arrival_step for s in build("burst")]
    assert steps == [0, 10, 20] + [30] * 12
    assert [s.arrival_step for s in build("burst", num_quiet=0, num_burst=2, at=4)] == [4, 4]


@pytest.mark.parametrize("tokenizer", [None, Letters()])
def test_shared_prefix_shares_several_blocks(tokenizer: Letters | None) -> None:
    prompts = [s.prompt_token_ids for s in build("shared-prefix", tokenizer=tokenizer)]
    common = next(i for i, ids in enumerate(zip(*prompts)) if len(set(ids)) > 1)
    assert common >= 128
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("seed", range(5))
def test_preemption_overfills_its_pool_but_each_request_fits(seed: int) -> None:
    config = EngineConfig(**PRESETS["preemption"].settings)
    first = build("preemption", seed=seed)[: config.max_num_seqs]
    blocks = [need(len(s.prompt_token_ids), s.max_tokens, config.block_size) for s in first]
    # The shortest output ends after the last of these has arrived, and by then what all have grown to no
    # longer fits.
    ends = min(s.max_tokens + (s.arrival_step or 0) for s in first)
    grown = [need(len(s.prompt_token_ids), ends - (s.arrival_step or 0), config.block_size) for s in first]
    assert sum(grown) > config.num_usable_blocks
    assert max(blocks) <= config.num_usable_blocks
    assert sum(need(len(s.prompt_token_ids), 0, config.block_size) for s in first) < config.num_usable_blocks


def test_long_prompt_needs_several_chunks_while_others_decode() -> None:
    config = EngineConfig(**PRESETS["long-prompt"].settings)
    specs = build("long-prompt")
    long = max(specs, key=lambda s: len(s.prompt_token_ids))
    assert config.max_num_batched_tokens is not None
    assert len(long.prompt_token_ids) > 5 * config.max_num_batched_tokens
    assert all(s.max_tokens > (long.arrival_step or 0) for s in specs if s.arrival_step == 0)


def test_random_has_times_and_follows_its_parameters() -> None:
    specs = build(
        "random", num_requests=50, rate=100.0, arrival="uniform", prompt_len=30, output_len="uniform:5:9"
    )
    assert [s.arrival_s for s in specs] == pytest.approx([i / 100 for i in range(50)])
    assert {len(s.prompt_token_ids) for s in specs} == {30}
    assert {s.max_tokens for s in specs} == {5, 6, 7, 8, 9}
    assert len({s.prompt_token_ids[:16] for s in specs}) == 50


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("artcle", {}, "did you mean 'article'"),
        ("no-such-thing-at-all", {}, "presets: article, chat"),
        ("article", {"num_request": 3}, "has no parameter 'num_request'; did you mean 'num_requests'"),
        ("article", {"num_requests": 0}, r"num_requests is 0, it must lie in 1\.\.1000000"),
        ("article", {"num_requests": 2.5}, "num_requests must be a whole number, got 2.5"),
        ("article", {"model_vocab": 1}, "model_vocab is 1, the least is 2"),
        ("chat", {"every": -1}, "every is -1, the least is 0"),
        ("burst", {"at": -1}, "the least is 0"),
        ("long-prompt", {"num_decodes": -1}, "num_decodes and at are -1"),
        ("random", {"rate": 0.0}, "rate is 0.0, it must be a finite number"),
        ("random", {"rate": float("nan")}, "rate is nan"),
        ("random", {"arrival": "often"}, "arrivals is 'often', it must be one of poisson"),
        ("random", {"prompt_len": "short"}, "length is 'short'; write a number"),
        ("random", {"prompt_len": 0}, r"length is 0, it must lie in 1\.\."),
    ],
)
def test_bad_parameters_are_named(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **params)  # type: ignore[arg-type]


def test_made_up_ids_of_texts_keep_shared_beginnings() -> None:
    made_up = MadeUp(0, 49152)
    a, b = (
        made_up.text("You are kind. What is a prime number?"),
        made_up.text("You are kind. Where is the sea?"),
    )
    assert a[:4] == b[:4]
    assert a[4] != b[4]
    assert 30 <= len(made_up.text(" ".join(["word"] * 30))) <= 60
    assert made_up.text("") == ()


def test_made_up_prompts_differ_from_the_first_block_on() -> None:
    made_up = MadeUp(1)
    assert len({made_up.ids(i, 16) for i in range(70_000)}) == 70_000
    assert [len(made_up.ids(5, n)) for n in (1, 2, 3, 200_000)] == [1, 2, 3, 200_000]
    assert made_up.ids(5, 100) == made_up.ids(5, 200)[:100] == MadeUp(1).ids(5, 100)


def test_the_memory_scenarios_show_what_they_promise() -> None:
    from cbviz import events as ev
    from cbviz.session import Session

    happened = {}
    for name in ("swap", "contiguous", "answers"):
        s = Session(name, runner="sim", **PRESETS[name].settings)
        s.run()
        happened[name] = [e for r in s.trace for e in r.events]
    assert any(isinstance(e, ev.SwappedIn) for e in happened["swap"])
    assert any(isinstance(e, ev.NotAdmitted) and e.reason == "fragments" for e in happened["contiguous"])
    assert {ev.Forked, ev.Copied} <= {type(e) for e in happened["answers"]}
