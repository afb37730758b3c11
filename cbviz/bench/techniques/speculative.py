"""Speculative decoding: drafts that the model checks in one step.

The benefit is time: alone a step is bound by reading the weights, so checking a few tokens more is nearly
free. In a full batch, and with drafts that are seldom right, it is a loss, and the rows say so. The cost is
what was computed and thrown away. Greedy tokens must be those of a run without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cbviz.bench.techniques import Context, Row, counted, measured, same_tokens
from cbviz.messages import RequestSpec, Sampling

if TYPE_CHECKING:
    from cbviz.session import Session

REPEATS = (
    "Copy this list twice, word for word: red apple, green pear, blue plum, yellow lemon, red cherry, "
    "green lime, blue grape, yellow banana."
)
CHAT = (
    "What is a cat?",
    "Write a short story about a robot who learns to paint.",
    "List the planets of the solar system.",
    "Explain how rain forms.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What does a compiler do?",
    "Describe a walk by the sea.",
)


def measure(ctx: Context) -> Iterator[Row]:
    n = 6 if ctx.quick else 48

    def ask(words: tuple[str, ...]) -> list[RequestSpec]:
        if ctx.model.tokenizer is None:  # a model without words: the same runs of tokens over and over
            v = ctx.model.config.vocab_size
            return [
                RequestSpec(
                    f"r{i}",
                    tuple((7 * i + k % 5) % (v - 4) + 3 for k in range(20)),
                    n,
                    arrival_step=0,
                    sampling=Sampling(ignore_eos=True),
                )
                for i in range(len(words))
            ]
        return [ctx.text(text, n, f"r{i}", chat=True) for i, text in enumerate(words)]

    layers = ctx.model.config.num_layers
    alone, chat, full = ask((REPEATS,)), ask(CHAT[:1]), ask(CHAT)
    ngram: dict[str, Any] = {"speculative": "ngram", "num_speculative_tokens": 3}
    cases: list[tuple[str, str, list[RequestSpec], dict[str, Any]]] = [
        ("alone, a text that repeats", "3 n-gram drafts", alone, ngram),
        ("alone, chat", "3 n-gram drafts", chat, ngram),
        (f"full batch of {len(full)}, chat", "3 n-gram drafts", full, ngram),
    ]
    for part in (layers // 3,) if ctx.quick else (layers // 3, 5 * layers // 6, layers - 2):
        if 0 < part < layers:
            first: dict[str, Any] = {
                "speculative": "self-draft",
                "num_speculative_tokens": 2,
                "draft_layers": part,
            }
            cases.append(("alone, chat", f"2 drafts by the first {part} of {layers} layers", chat, first))
    company: dict[str, Any] = {"max_num_seqs": len(full), "num_blocks": 128, "precision": "exact"}
    for setting, drafts, requests, fields in cases:
        plain, with_drafts = ctx.session(requests, **company), ctx.session(requests, **company, **fields)
        won = ctx.contest({"plain": plain, "drafts": with_drafts})
        rejected, checked = _drafts(with_drafts)
        said = sum(len(with_drafts.request(i).output_token_ids) for i in with_drafts.request_ids)
        length = said / max(1, sum(c.sample for r in with_drafts.trace for c in r.chunks))
        yield Row(
            setting,
            f"{drafts} against none",
            measured(won.ratio("plain", "drafts"), "x as fast"),
            counted(rejected, "tokens thrown away"),
            same_tokens(plain, with_drafts),
            (
                f"{checked - rejected:,} of {checked:,} drafts accepted, {length:.2f} tokens a request and "
                f"step; {len(with_drafts.trace)} steps for {len(plain.trace)}."
            ),
        )


def _drafts(s: Session) -> tuple[int, int]:
    """(thrown away, checked)"""
    return sum(r.tokens.rejected for r in s.trace), sum(c.num_draft for r in s.trace for c in r.chunks)
