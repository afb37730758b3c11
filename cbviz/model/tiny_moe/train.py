"""Makes the tiny mixture of experts: texts, tokenizer, training, the folder that ships.

README.md beside it says where the texts come from.

    python -m cbviz.model.tiny_moe.train --jargon jargon.txt --kjv kjv.txt --out FOLDER

Owns everything about how these weights came to be; nothing else in the package imports it. Architecture:
Qwen3-MoE's (`config.json`), trained from scratch on four kinds of text, each window of one kind, with the
load-balancing loss of the Switch Transformer (Fedus et al., JMLR 2022, section 2.2). It may be stopped at any
time: it continues from `state.pt` in the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SEED = 7
VOCAB, CONTEXT, TOKENS = 1024, 512, 2048
"""Tokens of the vocabulary, of the longest window, of a step."""
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, WIDTH = 192, 4, 6, 2, 32, 8, 2, 160
EPS, THETA = 1e-6, 10_000.0
BALANCE = 0.01
"""Weight of the load-balancing loss."""
LEARNING_RATE, WARMUP = 3e-3, 80
MIX = {"prose": 0.3, "verse": 0.25, "code": 0.3, "sums": 0.15}
"""Share of each kind of text in the training windows."""
END = "<|end|>"


# ---------------------------------------------------------------- texts


def prose(path: Path) -> str:
    """The Jargon File's lexicon: indentation taken away, boxes and headings left out."""
    text = path.read_text("utf-8", "replace")
    paragraphs = [re.sub(r"\s+", " ", p).strip() for p in text.split("\n\n")]
    return "\n".join(p for p in paragraphs if len(p) > 80 and not re.search(r"[│─┌├└]|\.{4}|_{4}", p))


def verse(path: Path) -> str:
    """The King James Bible, a verse a line, without its references."""
    lines = path.read_text("utf-8", "replace").splitlines()
    return "\n".join(re.sub(r"^\w+\s?\d+:\d+\s+", "", line).strip() for line in lines)


def code() -> str:
    """Python's standard library: its top-level modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in folder.glob("*.py") if not p.name.startswith("_"))
    return "\n".join(p.read_text("utf-8", "replace") for p in files)


def sums() -> str:
    """Lines of arithmetic, made here."""
    rng = random.Random(SEED)
    out = []
    for _ in range(60_000):
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        kind = rng.randrange(4)
        if kind == 0:
            out.append(f"{a} + {b} = {a + b}")
        elif kind == 1:
            out.append(f"{max(a, b)} - {min(a, b)} = {abs(a - b)}")
        elif kind == 2:
            out.append(f"{a % 13} * {b % 13} = {a % 13 * (b % 13)}")
        else:
            step = rng.randint(1, 9)
            out.append(", ".join(str(a + step * i) for i in range(8)))
    return "\n".join(out)


def texts(jargon: Path, kjv: Path) -> dict[str, str]:
    """The four kinds, each cut to what a few minutes can use. The last twentieth of each is held out."""
    return {
        "prose": prose(jargon)[:1_600_000],
        "verse": verse(kjv)[:1_600_000],
        "code": code()[:1_600_000],
        "sums": sums()[:700_000],
    }


def tokenizer_of(corpus: dict[str, str]) -> Any:
    """Byte-level BPE of `VOCAB` entries on all kinds; digits stand alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = [t[i : i + 2000] for t in corpus.values() for i in range(0, len(t) * 19 // 20, 2000)]
    core.train_from_iterator(pieces, trainer)
    return core


# ---------------------------------------------------------------- model


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Layer(nn.Module):
    """Attention with normed heads, then eight experts of which each token takes two."""

    def __init__(self) -> None:
        super().__init__()

        def w(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * scale * shape[-1] ** -0.5)

        self.attn_norm, self.mlp_norm = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.ones(HIDDEN))
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(HEAD_DIM)), nn.Parameter(torch.ones(HEAD_DIM))
        self.q, self.k, self.v = (
            w(HEADS * HEAD_DIM, HIDDEN),
            w(KV_HEADS * HEAD_DIM, HIDDEN),
            w(KV_HEADS * HEAD_DIM, HIDDEN),
        )
        self.o = w(HIDDEN, HEADS * HEAD_DIM, scale=(2 * LAYERS) ** -0.5)
        self.router = w(EXPERTS, HIDDEN)
        self.gate, self.up = w(EXPERTS, WIDTH, HIDDEN), w(EXPERTS, WIDTH, HIDDEN)
        self.down = w(EXPERTS, HIDDEN, WIDTH, scale=(2 * LAYERS) ** -0.5)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B, T, C] -> x, the balancing loss, and how many tokens each expert got."""
        b, t, _ = x.shape
        y = _norm(x, self.attn_norm)
        q = _turn(_norm((y @ self.q.T).view(b, t, HEADS, HEAD_DIM), self.q_norm).transpose(1, 2), cos, sin)
        k = _turn(_norm((y @ self.k.T).view(b, t, KV_HEADS, HEAD_DIM), self.k_norm).transpose(1, 2), cos, sin)
        v = (y @ self.v.T).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).reshape(b, t, -1) @ self.o.T

        y = _norm(x, self.mlp_norm).view(b * t, HIDDEN)
        shares = torch.softmax(y @ self.router.T, dim=-1)
        weights, chosen = shares.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.view(-1).argsort(stable=True)
        load = chosen.view(-1).bincount(minlength=EXPERTS)
        inputs = y[order // TOP_K].split(load.tolist())
        parts = [
            (F.silu(part @ self.gate[e].T) * (part @ self.up[e].T)) @ self.down[e].T
            for e, part in enumerate(inputs)
        ]
        out = torch.zeros_like(y).index_add(
            0, order // TOP_K, torch.cat(parts) * weights.view(-1)[order, None]
        )
        balance = EXPERTS * (load / (b * t * TOP_K) * shares.mean(0)).sum()
        return x + out.view(b, t, HIDDEN), balance, load


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(VOCAB, HIDDEN) * HIDDEN**-0.5)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids [B, T] -> logits [B, T, V], balancing loss, load [L, E]."""
        frequencies = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angles = torch.arange(ids.shape[1])[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(ids, self.embed)
        balance, loads = torch.zeros(()), []
        for layer in self.layers:
            x, extra, load = layer(x, cos, sin)
            balance = balance + extra / LAYERS
            loads.append(load)
        return _norm(x, self.norm) @ self.embed.T, balance, torch.stack(loads)


# ---------------------------------------------------------------- training


def window_length(step: int, num_steps: int) -> int:
    """Short windows first, so that a batch holds many kinds of text and the experts need not be alike; whole
    ones in the last fifth.
    """
    return CONTEXT if step >= 0.8 * num_steps else CONTEXT // 2


def batch(ids: dict[str, torch.Tensor], step: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, target) [TOKENS / length, length]: each row a random window of one kind.

    A function of the step, so that a run can go on.
    """
    rng = random.Random(f"{SEED} {step}")
    rows = []
    for kind in rng.choices(list(MIX), list(MIX.values()), k=TOKENS // length):
        at = rng.randrange(len(ids[kind]) - length - 1)
        rows.append(ids[kind][at : at + length + 1])
    both = torch.stack(rows)
    return both[:, :-1], both[:, 1:]


@torch.no_grad()
def held_out(model: Model, ids: dict[str, torch.Tensor], num_windows: int = 8) -> dict[str, float]:
    """Mean loss, nats a token, on the first windows of each held-out part."""
    out = {}
    for kind, all_ids in ids.items():
        rows = all_ids[: num_windows * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        logits = model(rows[:, :-1])[0]
        out[kind] = round(float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())), 4)
    return out


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    return LEARNING_RATE * (
        0.02 + 0.98 * (1 + math.cos(math.pi * (step - WARMUP) / (num_steps - WARMUP))) / 2
    )


def train(corpus: dict[str, str], out: Path, num_steps: int) -> None:
    """Trains, or goes on from `state.pt`; writes the folder when `num_steps` are done."""
    out.mkdir(parents=True, exist_ok=True)
    core = tokenizer_of(corpus)
    core.save(str(out / "tokenizer.json"), pretty=False)
    cut = {k: len(t) * 19 // 20 for k, t in corpus.items()}
    learn, test = (
        {k: torch.tensor(core.encode(t[: cut[k]] if first else t[cut[k] :]).ids) for k, t in corpus.items()}
        for first in (True, False)
    )
    torch.manual_seed(SEED)
    model = Model()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is m] for m in (True, False))
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
    )
    state_file = out / "state.pt"
    curve: list[dict[str, Any]] = []
    first, spent_s = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        first, curve, spent_s = state["step"], state["curve"], state["spent_s"]
    begun = time.perf_counter()
    running = []
    for step in range(first, num_steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        inputs, targets = batch(learn, step, window_length(step, num_steps))
        logits, balance, load = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        running.append(loss.item())
        done = step + 1
        if done % 25 == 0 or done == num_steps:
            line: dict[str, Any] = {
                "step": done,
                "tokens": done * TOKENS,
                "loss": round(sum(running) / len(running), 4),
                "balance": round(balance.item(), 4),
                "seconds": round(spent_s + time.perf_counter() - begun, 1),
            }
            running = []
            if done % 100 == 0 or done == num_steps:
                line["held_out"] = held_out(model, test)
                line["largest_share"] = round(float((load / load.sum(1, keepdim=True)).max()), 4)
            curve.append(line)
            print(json.dumps(line), flush=True)
        if done % 100 == 0:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "step": done,
                    "curve": curve,
                    "spent_s": line["seconds"],
                },
                state_file,
            )
    write(model, corpus, curve, learn, test, out)


def write(
    model: Model,
    corpus: dict[str, str],
    curve: list[dict[str, Any]],
    learn: dict[str, torch.Tensor],
    test: dict[str, torch.Tensor],
    out: Path,
) -> None:
    """The folder as Hugging Face's layout has it, weights in float16, and `training.json` with figures and
    checksums of the texts.
    """
    from safetensors.torch import save_file

    w = model.state_dict()
    tensors = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["norm"]}
    for i in range(LAYERS):

        def of(name: str, i: int = i) -> torch.Tensor:
            return w[f"layers.{i}.{name}"]

        p = f"model.layers.{i}"
        tensors |= {
            f"{p}.input_layernorm.weight": of("attn_norm"),
            f"{p}.post_attention_layernorm.weight": of("mlp_norm"),
            f"{p}.mlp.gate.weight": of("router"),
            f"{p}.self_attn.q_norm.weight": of("q_norm"),
            f"{p}.self_attn.k_norm.weight": of("k_norm"),
        }
        tensors |= {f"{p}.self_attn.{n}_proj.weight": of(n) for n in "qkvo"}
        tensors |= {
            f"{p}.mlp.experts.{e}.{n}_proj.weight": of(n)[e]
            for e in range(EXPERTS)
            for n in ("gate", "up", "down")
        }
    save_file(
        {n: t.half().contiguous() for n, t in tensors.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDTH,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 4 * CONTEXT,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "router_aux_loss_coef": BALANCE,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template},
            indent=1,
        )
        + "\n",
        "utf-8",
    )
    about = {
        "seed": SEED,
        "num_params": sum(p.numel() for p in model.parameters()),
        "num_steps": curve[-1]["step"],
        "tokens_a_step": TOKENS,
        "mix": MIX,
        "balance_weight": BALANCE,
        "learning_rate": LEARNING_RATE,
        "torch": torch.__version__,
        "python": sysconfig.get_python_version(),
        "texts": {
            k: {
                "characters": len(t),
                "tokens": len(learn[k]),
                "held_out_tokens": len(test[k]),
                "sha256": hashlib.sha256(t.encode()).hexdigest(),
            }
            for k, t in corpus.items()
        },
        "curve": curve,
    }
    (out / "training.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")


def picture(about: dict[str, Any]) -> str:
    """The loss curve as SVG: training loss as a line, each held-out kind as marked points. Nats a token."""
    width, height, left, top = 720, 360, 46, 14
    curve = about["curve"]
    last = curve[-1]["step"]
    most = math.ceil(max(line["loss"] for line in curve))

    def at(step: float, loss: float) -> str:
        return f"{left + (width - left - 90) * step / last:.1f},{top + (height - top - 34) * (1 - loss / most):.1f}"

    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" '
            'font-size="12">'
        ),
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for y in range(most + 1):
        (x0, y0), (x1, _) = at(0, y).split(","), at(last, y).split(",")
        out.append(
            f'<path d="M{x0},{y0}H{x1}" stroke="#dde3e9"/><text x="{left - 8}" y="{float(y0) + 4:.1f}" '
            f'text-anchor="end" fill="#59636e">{y}</text>'
        )
    for x in range(0, last + 1, 500):
        out.append(
            f'<text x="{at(x, 0).split(",")[0]}" y="{height - 16}" text-anchor="middle" '
            f'fill="#59636e">{x}</text>'
        )
    out.append(
        f'<text x="{width / 2 - 20}" y="{height - 2}" text-anchor="middle" fill="#59636e">steps of '
        f"{about['tokens_a_step']:,} tokens; loss in nats a token</text>"
    )
    out.append(
        f'<polyline points="{" ".join(at(line["step"], line["loss"]) for line in curve)}" fill="none" '
        'stroke="#59636e" stroke-width="1.5"/>'
    )
    marks = {
        "prose": ("#0b6aa8", "4 0"),
        "verse": ("#d55e00", "6 3"),
        "code": ("#009e73", "2 3"),
        "sums": ("#cc79a7", "8 3 2 3"),
    }
    held = [line for line in curve if "held_out" in line]
    label = float("inf")
    for kind, (colour, dash) in sorted(
        marks.items(), key=lambda m: held[-1]["held_out"][m[0]]
    ):  # lowest first, so that labels make room upwards
        points = [at(line["step"], line["held_out"][kind]) for line in held]
        out.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        end_x, end_y = points[-1].split(",")
        label = min(float(end_y) + 4, label - 14)
        out.append(
            f'<text x="{float(end_x) + 6:.1f}" y="{label:.1f}" fill="{colour}">{kind} '
            f"{held[-1]['held_out'][kind]:.2f}</text>"
        )
    out.append(
        f'<text x="{left + 60}" y="{top + 16}" fill="#59636e">grey: training windows of all kinds; the '
        "others: held-out texts</text></svg>"
    )
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the tiny mixture of experts.")
    parser.add_argument("--jargon", type=Path, required=True, help="the Jargon File as text (jargon.txt)")
    parser.add_argument(
        "--kjv",
        type=Path,
        required=True,
        help="the King James Bible, a verse a line (bible -f gen1:1-rev22:21)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the model; state.pt there is continued"
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="also draws the loss curve into this SVG file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    train(texts(given.jargon, given.kjv), given.out, given.steps)
    if given.picture:
        given.picture.write_text(
            picture(json.loads((given.out / "training.json").read_text("utf-8"))), "utf-8"
        )


if __name__ == "__main__":
    main()
