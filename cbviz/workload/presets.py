"""Every scenario in one table: what it is, how its requests are made, and the settings under which it shows
its point. Knows no engine.

Classroom scenarios arrive by step, so that they replay the same on every machine. Texts get the model's chat
template where a tokenizer is given; without one, made-up ids of a plausible length (`prompts`). `output_len`
holds for simulated and taped runs; a real model stops where it wants to, unless `ignore_eos`.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cbviz.config import ConfigError
from cbviz.messages import RequestSpec, Sampling
from cbviz.workload import arrivals, lengths, texts
from cbviz.workload.prompts import Encoder, MadeUp, chat, id_range

MOST_REQUESTS = 1_000_000


@dataclass(frozen=True)
class Source:
    """What a scenario draws from: the seed, ids and texts."""

    seed: int
    model_vocab: int | None
    tokenizer: Encoder | None

    def rng(self) -> random.Random:
        return random.Random(self.seed)

    def made_up(self) -> MadeUp:
        return MadeUp(self.seed, self.model_vocab)


@dataclass(frozen=True)
class Preset:
    """A named workload with its settings and title."""

    name: str
    title: str
    description: str
    """One sentence: what happens and what to watch."""
    make: Callable[..., list[RequestSpec]]
    """Called with a Source and the scenario's own parameters, which are its keyword arguments."""
    settings: dict[str, Any] = field(default_factory=dict)
    """EngineConfig fields that the explorer starts with."""

    @property
    def params(self) -> dict[str, Any]:
        """The scenario's parameters and their defaults."""
        return {
            p.name: p.default
            for p in inspect.signature(self.make).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }


def _article(source: Source, *, num_requests: int = 20) -> list[RequestSpec]:
    _count(num_requests)
    # The article's own draws; its seed is part of the workload, so the run's seed changes nothing.
    size, word = random.Random(42), random.Random(7)
    drawn = [(size.randint(10, 100), size.randint(20, 200)) for _ in range(num_requests)]
    low, high = id_range(source.model_vocab)
    span = high - low + 1
    specs = []
    for i, (prompt_len, output_len) in enumerate(drawn):
        # With the usual vocabularies these are the draws themselves; a smaller one wraps around.
        ids = tuple(low + (word.randint(100, 40_000) - 100) % span for _ in range(prompt_len))
        specs.append(
            RequestSpec(
                f"r{i + 1}",
                ids,
                output_len,
                arrival_step=0,
                sampling=Sampling(ignore_eos=True),
                output_len=output_len,
            )
        )
    return specs


def _chat(source: Source, *, num_requests: int = 16, every: int = 3) -> list[RequestSpec]:
    _count(num_requests)
    _gap(every)
    rng = source.rng()
    steps, step = [], 0
    for _ in range(num_requests):
        steps.append(step)
        step += rng.randint(0, 2 * every)
    return _talk(source, rng, steps, least=24, most=60)


def _burst(source: Source, *, num_quiet: int = 3, num_burst: int = 12, at: int = 30) -> list[RequestSpec]:
    _count(num_quiet + num_burst)
    if num_quiet < 0 or num_burst < 0 or at < 0:
        raise ConfigError(
            f"num_quiet, num_burst and at are {num_quiet}, {num_burst} and {at}, the least is 0"
        )
    steps = [i * at // max(1, num_quiet) for i in range(num_quiet)] + [at] * num_burst
    return _talk(source, source.rng(), steps, least=16, most=48)


def _shared_prefix(source: Source, *, num_requests: int = 10, every: int = 2) -> list[RequestSpec]:
    _count(num_requests)
    _gap(every)
    rng = source.rng()
    # The second waits until the first has computed the system prompt, so that there is something to find.
    steps = [0] + [8 + every * i for i in range(num_requests - 1)]
    questions = [texts.SYSTEM_QUESTIONS[i % len(texts.SYSTEM_QUESTIONS)] for i in range(num_requests)]
    return _talk(source, rng, steps, least=20, most=44, questions=questions, system=texts.SYSTEM)


def _preemption(source: Source, *, num_requests: int = 10, every: int = 2) -> list[RequestSpec]:
    _count(num_requests)
    _gap(every)
    return _talk(
        source, source.rng(), [every * i for i in range(num_requests)], least=56, most=88, ignore_eos=True
    )


def _answers(
    source: Source, *, num_requests: int = 7, n: int = 3, every: int = 3, temperature: float = 0.8
) -> list[RequestSpec]:
    _count(num_requests)
    _gap(every)
    asked = _talk(source, source.rng(), [every * i for i in range(num_requests)], least=24, most=48)
    return [
        msgspec.structs.replace(x, sampling=msgspec.structs.replace(x.sampling, n=n, temperature=temperature))
        for x in asked
    ]


def _long_prompt(source: Source, *, num_decodes: int = 5, at: int = 12) -> list[RequestSpec]:
    _count(num_decodes + 2)
    if num_decodes < 0 or at < 0:
        raise ConfigError(f"num_decodes and at are {num_decodes} and {at}, the least is 0")
    rng = source.rng()
    steps = [0] * num_decodes + [at, at + 2]
    questions = [*_pick(rng, num_decodes), texts.LONG, texts.CHAT[16]]
    return _talk(source, rng, steps, least=40, most=60, questions=questions, ignore_eos=True)


def _random(
    source: Source,
    *,
    num_requests: int = 200,
    rate: float = 10.0,
    arrival: str = "poisson",
    prompt_len: int | str = "lognormal:200:1.0:2000",
    output_len: int | str = "lognormal:100:0.8:800",
) -> list[RequestSpec]:
    _count(num_requests)
    rng = source.rng()
    times = arrivals.draw(arrival, num_requests, rate, rng)
    prompts, outputs = (
        lengths.draw(prompt_len, num_requests, rng),
        lengths.draw(output_len, num_requests, rng),
    )
    made_up = source.made_up()
    return [
        RequestSpec(
            f"r{i + 1}", made_up.ids(i, p), o, arrival_s=t, sampling=Sampling(ignore_eos=True), output_len=o
        )
        for i, (t, p, o) in enumerate(zip(times, prompts, outputs))
    ]


def _talk(
    source: Source,
    rng: random.Random,
    steps: Sequence[int],
    *,
    least: int,
    most: int,
    questions: Sequence[str] | None = None,
    system: str = "",
    ignore_eos: bool = False,
) -> list[RequestSpec]:
    """One conversation of one question a step in `steps`; outputs of `least` to `most` tokens."""
    made_up = source.made_up()
    specs = []
    for i, (step, question) in enumerate(zip(steps, questions or _pick(rng, len(steps)))):
        messages = [{"role": "system", "content": system}] if system else []
        ids = chat([*messages, {"role": "user", "content": question}], source.tokenizer, made_up)
        n = rng.randint(least, most)
        specs.append(
            RequestSpec(
                f"r{i + 1}",
                ids,
                n,
                arrival_step=step,
                sampling=Sampling(ignore_eos=ignore_eos),
                output_len=n,
                prompt=question,
            )
        )
    return specs


def _pick(rng: random.Random, num: int) -> list[str]:
    """`num` questions in an order drawn from `rng`; none comes again before all have come."""
    picked: list[str] = []
    while len(picked) < num:
        picked += rng.sample(texts.CHAT, len(texts.CHAT))
    return picked[:num]


def _count(num_requests: int) -> None:
    if not 1 <= num_requests <= MOST_REQUESTS:
        raise ConfigError(f"num_requests is {num_requests}, it must lie in 1..{MOST_REQUESTS}")


def _gap(every: int) -> None:
    if every < 0:
        raise ConfigError(f"every is {every}, the least is 0 steps")


PRESETS: dict[str, Preset] = {
    p.name: p
    for p in (
        Preset(
            "article",
            "The article's benchmark",
            (
                "Twenty requests at once, prompts of 10 to 100 and outputs of 20 to 200 tokens: watch short "
                "requests leave and others take their seats."
            ),
            _article,
            {"discipline": "chunked", "max_num_seqs": 8, "num_blocks": 256, "block_size": 16},
        ),
        Preset(
            "chat",
            "A chat service",
            (
                "Sixteen questions arrive one after another, and answers of different length share the "
                "batch: "
                "watch requests join and leave at every step."
            ),
            _chat,
            {
                "discipline": "chunked",
                "max_num_seqs": 8,
                "num_blocks": 256,
                "block_size": 16,
                "max_num_batched_tokens": 128,
            },
        ),
        Preset(
            "burst",
            "A burst",
            (
                "Three quiet requests, then twelve at once for four seats: watch the queue grow and drain, "
                "and "
                "who waits longest."
            ),
            _burst,
            {
                "discipline": "chunked",
                "max_num_seqs": 4,
                "num_blocks": 256,
                "block_size": 16,
                "max_num_batched_tokens": 128,
            },
        ),
        Preset(
            "shared-prefix",
            "One system prompt for all",
            (
                "Ten questions behind the same long system prompt: watch its blocks being computed once and "
                "then shared."
            ),
            _shared_prefix,
            {
                "discipline": "chunked",
                "max_num_seqs": 6,
                "num_blocks": 256,
                "block_size": 16,
                "max_num_batched_tokens": 128,
                "enable_prefix_caching": True,
            },
        ),
        Preset(
            "preemption",
            "Memory runs out",
            (
                "Ten requests that grow in a pool too small for eight of them: watch one lose its blocks, go "
                "back to the queue and compute them again."
            ),
            _preemption,
            {
                "discipline": "chunked",
                "max_num_seqs": 8,
                "num_blocks": 33,
                "block_size": 16,
                "max_num_batched_tokens": 128,
                "enable_prefix_caching": False,
            },
        ),
        Preset(
            "swap",
            "Memory runs out, and the host has some",
            (
                "The same ten requests, but who loses its blocks has them copied to the host and back: watch "
                "the strip under the block map, and that nothing is computed twice."
            ),
            _preemption,
            {
                "discipline": "chunked",
                "max_num_seqs": 8,
                "num_blocks": 33,
                "block_size": 16,
                "max_num_batched_tokens": 128,
                "enable_prefix_caching": False,
                "preemption_mode": "swap",
                "swap_blocks": 32,
            },
        ),
        Preset(
            "contiguous",
            "Before paging",
            (
                "Each request gets one run of blocks for all that it may become: watch somebody wait though "
                "enough blocks are free, because no run of them is long enough."
            ),
            _chat,
            {
                "discipline": "chunked",
                "max_num_seqs": 8,
                "num_blocks": 33,
                "block_size": 16,
                "max_num_batched_tokens": 128,
                "enable_prefix_caching": False,
                "kv_allocation": "contiguous",
            },
        ),
        Preset(
            "answers",
            "Three answers to each prompt",
            (
                "Seven prompts, three sampled answers to each: watch the prompt's blocks being shared, and "
                "the "
                "last one copied by whoever writes into it first."
            ),
            _answers,
            {
                "discipline": "chunked",
                "max_num_seqs": 9,
                "num_blocks": 64,
                "block_size": 16,
                "max_num_batched_tokens": 128,
            },
        ),
        Preset(
            "long-prompt",
            "A long prompt among decodes",
            (
                "Five requests decode when a prompt of hundreds of tokens comes: watch it being cut into "
                "chunks that leave the others room, or hold them up without chunking."
            ),
            _long_prompt,
            {
                "discipline": "chunked",
                "max_num_seqs": 8,
                "num_blocks": 256,
                "block_size": 16,
                "max_num_batched_tokens": 64,
            },
        ),
        Preset(
            "random",
            "Random arrivals",
            (
                "Requests arrive at random with a given rate and lengths drawn from a distribution, by the "
                "clock: for the simulator, to see load and latency."
            ),
            _random,
            {
                "discipline": "chunked",
                "max_num_seqs": 64,
                "num_blocks": 4096,
                "block_size": 16,
                "max_num_batched_tokens": 512,
            },
        ),
    )
}

__all__ = ["PRESETS", "Preset", "Source"]
