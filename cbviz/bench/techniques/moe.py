"""Mixture of experts.

What routing saves and what is left of it in a batch, on the tiny mixture that ships with the package: which
weights a decode step really reads, counted from the real choices; sorted tokens and grouped products against
a loop over experts; and whether grouping requests by the experts they use pays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cbviz.bench.techniques import Check, Context, Row, counted, measured, same_tokens

if TYPE_CHECKING:
    from cbviz.messages import RequestSpec
    from cbviz.model.loader import LoadedModel
    from cbviz.session import Session

PROMPTS = {
    "prose": (
        "A hacker is a person who enjoys exploring the details of ",
        "The term was first used at MIT in the ",
        "This word is often used of programs that ",
        "See also {",
        "In the early days of the Internet, ",
        "Some people think that software ",
        "The canonical example of this is ",
        "It is said that a good programmer ",
    ),
    "verse": (
        "And the LORD said unto Moses, ",
        "And it came to pass in those days, that ",
        "These are the names of the children of Israel, ",
        "And he took the bread, and ",
        "Thou shalt not ",
        "And the king answered and said, ",
        "Then Joshua sent unto the elders ",
        "And all the people that were with him ",
    ),
    "code": (
        "def read(self, size=-1):\n    ",
        "class Parser:\n    def __init__(self, ",
        "    if not isinstance(value, str):\n        raise ",
        "import os\nimport sys\n\n",
        "    for name in names:\n        ",
        "    try:\n        return self._",
        'def _check(self, name):\n    """',
        "        self.assertEqual(",
    ),
    "sums": (
        "12 + 30 = 42\n7 + 51 = ",
        "90 - 17 = 73\n44 - 3 = ",
        "3, 6, 9, 12, 15, 18, 21, 24\n",
        "5 * 6 = 30\n11 * 4 = ",
        "0 + 0 = 0\n50 + 49 = ",
        "17, 22, 27, 32, 37, ",
        "8 * 8 = ",
        "61 - 60 = 1\n",
    ),
}


def asked(model: LoadedModel, num: int, max_tokens: int, uneven: bool = False) -> list[RequestSpec]:
    """`num` requests, kind after kind in turn, the session named after the kind.

    `uneven`: lengths between a half and one and a half of `max_tokens`, so that seats come free one at a
    time.
    """
    from cbviz.messages import RequestSpec, Sampling

    assert model.tokenizer is not None
    out = []
    kinds = tuple(PROMPTS)
    for i in range(num):
        kind = kinds[i % len(kinds)]
        texts = PROMPTS[kind]
        length = max_tokens // 2 + i * 7 % (max_tokens + 1) if uneven else max_tokens
        out.append(
            RequestSpec(
                f"{kind}{i}",
                tuple(model.tokenizer.encode(texts[i // len(kinds) % len(texts)])),
                length,
                arrival_step=0,
                session=kind,
                sampling=Sampling(ignore_eos=True, temperature=0.8),
            )
        )
    return out


def decode_steps(s: Session, rows: int) -> list[Any]:
    """Records of the steps in which exactly `rows` requests decode and nothing else is computed."""
    return [r for r in s.trace if len(r.chunks) == rows and all(c.kind == "decode" for c in r.chunks)]


def touched(record: Any) -> float:
    """Distinct experts that a step's tokens took, mean over the sparse layers."""
    rows = [row for row in record.expert_load if row]
    return sum(n > 0 for row in rows for n in row) / len(rows)


def measure(ctx: Context) -> Iterator[Row]:
    from cbviz.model.loader import load
    from cbviz.model.ops import REFERENCE

    model = load("tiny-moe")
    c = model.config
    decoder = model.decoder(REFERENCE)
    layers, experts = len(c.sparse_layers), c.num_experts
    common: dict[str, Any] = {"precision": "exact", "num_blocks": 400, "max_model_len": 256}
    tokens = 12 if ctx.quick else 48
    for batch in (1, 8) if ctx.quick else (1, 2, 4, 8, 32):
        ctx.tell(f"decode, batch of {batch}")
        s = ctx.session(asked(model, batch, tokens), model, max_num_seqs=batch, **common)
        s.run()
        steps = decode_steps(s, batch)
        mine = sum(map(touched, steps)) / len(steps)
        even = experts * (1 - (1 - c.num_experts_per_tok / experts) ** batch)
        always = decoder.layer_bytes + decoder.head_bytes + batch * decoder.embed_row_bytes
        right = all(
            r.counted["weight_bytes"] == always + touched(r) * layers * decoder.expert_bytes for r in steps
        )
        per_token = sum(r.counted["weight_bytes"] for r in steps) / len(steps) / batch
        yield Row(
            f"decode, batch of {batch}",
            "experts touched against all",
            benefit=counted(100 * (1 - mine / experts), "% of the experts' weights not read a step"),
            cost=counted(per_token / 1e6, "MB of weights a token"),
            check=Check(f"bytes equal the records' loads in {len(steps)} steps", right),
            note=f"{mine:.2f} of {experts} experts a layer; even routing would touch {even:.2f}",
        )
    yield from _products(ctx, model)
    yield from _grouping(ctx, model, common)


def _products(ctx: Context, model: LoadedModel) -> Iterator[Row]:
    import torch

    from cbviz.model import ops

    c, layer = model.config, model.weights.layers[0]
    gate_up, down = (
        ops.pack_experts(layer.gate_up, c.num_experts),
        ops.pack_experts(layer.down, c.num_experts),
    )
    assert layer.router is not None
    g = torch.Generator().manual_seed(ctx.seed)
    for rows in (8,) if ctx.quick else (1, 8, 256):
        x = torch.randn(rows, c.hidden_size, generator=g)
        weights, chosen = ops.route(x @ layer.router.T, None, c.num_experts_per_tok, c.router)
        repeat = 20 if ctx.quick else 200

        def run(
            f: Any, x: Any = x, weights: Any = weights, chosen: Any = chosen, repeat: int = repeat
        ) -> Any:
            for _ in range(repeat):
                y = f(x, weights, chosen, gate_up, down)
            return y

        won = ctx.contest(
            {"loop": lambda: run(ops.experts_loop), "grouped": lambda: run(ops.experts_grouped)}
        )
        far = float((won.results["loop"] - won.results["grouped"]).abs().max())
        yield Row(
            f"{rows} tokens, one layer",
            "sorted and grouped against a loop",
            benefit=measured(won.ratio("loop", "grouped"), "x as fast"),
            cost=counted(
                4 * rows * c.num_experts_per_tok * (2 * c.hidden_size + 3 * c.moe_intermediate_size) / 1e3,
                "KB of sorted copies",
            ),
            check=Check(f"largest difference {far:.1e}", far < 1e-4),
        )


def _grouping(ctx: Context, model: LoadedModel, common: dict[str, Any]) -> Iterator[Row]:
    """Few seats, many waiting requests of four kinds: who is let in beside whom.

    Beside it what one seat more does, which needs no policy.
    """
    seats, num, tokens = (2, 8, 8) if ctx.quick else (4, 32, 32)
    requests = asked(model, num, tokens, uneven=True)
    settings = {"fcfs": ("fcfs", seats), "experts": ("experts", seats), "one more": ("fcfs", seats + 1)}
    runs = {
        name: ctx.session(requests, model, max_num_seqs=n, policy=p, enable_prefix_caching=False, **common)
        for name, (p, n) in settings.items()
    }
    won = ctx.contest(runs)
    read, distinct = {}, {}
    for p, s in runs.items():
        steps = decode_steps(s, settings[p][1])
        distinct[p] = sum(map(touched, steps)) / len(steps)
        read[p] = sum(r.counted["weight_bytes"] for r in s.trace if r.counted) / sum(
            len(s.request(i).output_token_ids) for i in s.request_ids
        )
    for name, versus in (
        ("experts", "policy experts against fcfs"),
        ("one more", f"fcfs with {seats + 1} seats against fcfs"),
    ):
        yield Row(
            f"{seats} seats, {num} requests of four kinds",
            versus,
            benefit=measured(won.ratio("fcfs", name), "x as fast"),
            cost=counted(100 * (read[name] / read["fcfs"] - 1), "% weight bytes a token (below 0: fewer)"),
            check=same_tokens(runs["fcfs"], runs[name]),
            note=(
                f"distinct experts a layer in a full step: {distinct['fcfs']:.2f} against "
                f"{distinct[name]:.2f}"
            ),
        )
