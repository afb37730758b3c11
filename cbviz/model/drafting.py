"""Drafts from a model: the first layers of the model itself, or a second model.

What speculative decoding checks afterwards.

Owns the drafting passes and, for a second model, its KV. Knows no plan and no queue: it is given sequences
(token ids, block table) and gives back what may come next. Drafts are only guesses, so nothing here can
change what a request says.

    self-draft    the first L layers, then the model's last norm and head (early exit: LayerSkip, Elhoushi et al., ACL 2024; here on weights as they
                  are, not trained for it). Its keys and values at checked positions are the model's own;
                  those of drafts go into slots behind them, in these layers alone, and the check writes over
                  them.
    draft-model   a smaller model with the same vocabulary (Leviathan et al., ICML 2023), with a KV store of its own under the same block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cbviz.messages import Sampling
from cbviz.model.decoder import Decoder
from cbviz.model.kv_store import KVStore, chain_all
from cbviz.model.ops import Batch
from cbviz.model.sampling import Draw, sample


@dataclass(frozen=True, slots=True)
class Line:
    """One sequence: all its tokens, and the slots they have.

    The KV of all but the last token is there, or can be computed.
    """

    request_id: str
    ids: list[int]
    table: Sequence[int]
    sampling: Sampling
    seed: int


class Drafter:
    """Proposes with `decoder` over `kv`.

    `own`: the store is this drafter's, and holds what its ledger says; otherwise it is the checking model's.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVStore,
        own: bool,
        choose: Callable[[torch.Tensor], tuple[list[int], list[float], list[float]]],
    ) -> None:
        self.decoder, self.kv, self.own, self._choose = decoder, kv, own, choose
        self.counted = {"flops": 0.0, "weight_bytes": 0.0, "kv_bytes": 0.0}
        """Work since this was last cleared, from the shapes of the passes."""

    def follow(self, sequences: Sequence[Line]) -> None:
        """Computes what the own store lacks of these sequences (prompts that are being computed in chunks)."""
        if not self.own:
            return
        parts = [(s, first) for s in sequences if (first := self._first_missing(s)) < len(s.ids)]
        if parts:
            self._fill(parts, [])

    def propose(self, sequences: Sequence[Line], k: int) -> list[list[int]]:
        """At most `k` drafts for each sequence, fewer where its slots or the positions of the drafting model
        end.

        Each draft is drawn as the model will draw the token itself: greedily, or by the same random number
        from this model's own probabilities. Equal numbers pick equal tokens wherever the two distributions
        agree, which is when a draft is right.
        """
        drafts: list[list[int]] = [[] for _ in sequences]
        size, context = self.kv.block_size, self.decoder.config.max_context
        for j in range(k):
            active = [
                i
                for i, s in enumerate(sequences)
                if len(drafts[i]) == j and len(s.ids) + j <= min(len(s.table) * size, context)
            ]
            if not active:
                break
            some = [sequences[i] for i in active]
            if j == 0 and self.own:
                logits = self._fill(
                    [(s, min(self._first_missing(s), len(s.ids) - 1)) for s in some],
                    [len(s.ids) - 1 for s in some],
                )
            else:
                at = [len(s.ids) - 1 + j for s in some]
                self.kv.clear(
                    [s.table[p // size] for s, p in zip(some, at, strict=True)], [p % size for p in at]
                )
                logits = self._pass(
                    [
                        ([(drafts[i] or s.ids)[-1]], p, s.table)
                        for i, s, p in zip(active, some, at, strict=True)
                    ],
                    list(range(len(some))),
                )
            chosen = sample(
                logits, [Draw(s.sampling, s.seed, s.request_id, len(s.ids) + j) for s in some], self._choose
            )
            for i, c in zip(active, chosen, strict=True):
                drafts[i].append(c.token_id)
        return drafts

    def _first_missing(self, s: Line) -> int:
        """First position whose KV the own store lacks.

        What a sliding window has left behind counts as there.
        """
        size = self.kv.block_size
        at = np.arange(len(s.ids))
        blocks = np.array(s.table, dtype=np.int64)[at // size]
        held = (self.kv.ledger[blocks, at % size] == np.array(chain_all(s.ids), dtype=np.int64)) | (
            blocks == 0
        )
        return len(s.ids) if held.all() else int(held.argmin())

    def _fill(self, parts: Sequence[tuple[Line, int]], sampled: list[int]) -> torch.Tensor:
        """Computes each sequence from a position to its end, and notes that the own store holds it.

        Logits of the last tokens if `sampled`.
        """
        size = self.kv.block_size
        slots: dict[tuple[int, int], int] = {}
        for s, first in parts:
            for p, h in enumerate(chain_all(s.ids)[first:], first):
                slots[s.table[p // size], p % size] = h
        blocks, offsets = [b for b, _ in slots], [o for _, o in slots]
        self.kv.clear(blocks, offsets)
        ends = np.cumsum([len(s.ids) - first for s, first in parts]).tolist()
        logits = self._pass(
            [(s.ids[first:], first, s.table) for s, first in parts], [e - 1 for e in ends] if sampled else []
        )
        self.kv.record(blocks, offsets, list(slots.values()))
        return logits

    def _pass(self, parts: Sequence[tuple[list[int], int, Sequence[int]]], rows: list[int]) -> torch.Tensor:
        """One pass over parts (token ids, first position, block table)."""
        d, kv = self.decoder, self.kv
        lens = [len(ids) for ids, _, _ in parts]
        batch = Batch.build(
            [list(table) for _, _, table in parts],
            lens,
            [start + n for (_, start, _), n in zip(parts, lens, strict=True)],
            kv.block_size,
            0,
            kv.device,
        )
        token_ids, positions, sample_rows = (
            torch.tensor(x, dtype=torch.int64, device=kv.device)
            for x in (
                [t for ids, _, _ in parts for t in ids],
                [p for ids, start, _ in parts for p in range(start, start + len(ids))],
                rows,
            )
        )
        logits = d.forward(token_ids, positions, batch, kv, sample_rows)
        c, num_tokens = d.config, sum(lens)
        seen = sum(start + n for (_, start, _), n in zip(parts, lens, strict=True))
        pairs = sum(n * start + n * (n + 1) // 2 for (_, start, _), n in zip(parts, lens, strict=True))
        routed = d.expert_params * c.num_experts_per_tok * len(c.sparse_layers)
        self.counted["flops"] += (
            2.0 * (d.layer_matmul_params + routed) * num_tokens
            + 2.0 * c.hidden_size * c.vocab_size * len(rows)
            + 4.0 * c.q_size * pairs * c.num_layers
        )
        self.counted["weight_bytes"] += float(
            d.layer_bytes + d.embed_row_bytes * num_tokens + (d.head_bytes if rows else 0)
        )
        self.counted["kv_bytes"] += float(kv.bytes_per_token) * (seen + num_tokens)
        return logits
