"""Runs a real model: a `SchedulerOutput` in, real tokens and measured seconds out.

Owns the model, the KV store and its ledger. Knows no queue, policy or earlier plan: a chunk carries its
tokens and its block table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import cbviz.model  # noqa: F401  before torch: it settles how torch's threads wait

# isort: split
import numpy as np
import psutil
import torch

from cbviz.config import ConfigError, EngineConfig, as_run
from cbviz.messages import Chunk, Drafting, RunnerOutput, Sampling, SchedulerOutput, Span, StepProfile
from cbviz.model import device_peaks, nvml, ops, profile, threads
from cbviz.model.decoder import Decoder, DecoderConfig
from cbviz.model.divergence import Alone, StepDifference, alone, step_difference
from cbviz.model.drafting import Drafter, Line
from cbviz.model.graphs import Backend, device_pass, exact_float32
from cbviz.model.hub import ModelSource, Progress
from cbviz.model.kv_store import EMPTY, STORAGE, KVStore, chain_all
from cbviz.model.loader import LoadedModel, load
from cbviz.model.ops import Batch, OpSet
from cbviz.model.rowwise import ROWWISE
from cbviz.model.sampling import Draw, Sampled, num_accepted, sample
from cbviz.model.swap import HostStore
from cbviz.model.tokenizer import Tokenizer
from cbviz.runners.base import RunnerError
from cbviz.specs import DeviceSpec, ModelSpec

_SYNC_TOKENS = 512
"""Tokens of one pass of `sync`: bounds its activations."""


class TorchRunner:
    """A decoder (dense, mixture of experts, MLA) over a paged KV store.

    `model`: what `hub.resolve` takes (a registry name, folder, GGUF file or hub id), or a model already
    loaded, whose weights are then shared. Of `config` it reads block_size, num_blocks, kv_cache_memory_bytes,
    kv_cache_dtype, swap_blocks, sliding_window, attention_sinks, precision, kernels, batch_invariant, device,
    enforce_eager, max_num_seqs (seats that recorded passes are made for), seed, speculative, draft_layers and
    draft_model; how drafts are made stands in each plan. Raises ConfigError for a field that asks for what
    does not exist, ModelError for a model that cannot be had.
    """

    gives_candidates = True
    """Beam search can be run: it knows the probabilities of next tokens."""

    def __init__(
        self,
        model: str | ModelSource | LoadedModel = "smollm2",
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        backend: Backend | None = None,
        draft: LoadedModel | None = None,
    ) -> None:
        """`draft`: the drafting model, if it is loaded already.

        `backend`: runs passes as on a card that works beside the host (`model.graphs`). None: on CUDA the
        card, on the CPU none.
        """
        config = config or EngineConfig()
        self.config = config
        self.device = pick_device(config.device)
        self.num_threads = threads.use_available_cpus()
        if self.device.type == "cuda":
            exact_float32()
        self.model = model if isinstance(model, LoadedModel) else load(model, progress=progress)
        c = self.model.config
        kept = torch.float32 if config.precision == "exact" else torch.float16
        self.ops, self.decoder = self._operators(
            config, ops.Shape(c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, config.block_size, kept)
        )
        self._spec = as_run(self.model.spec(config.precision), config)
        stored = kept if config.kv_cache_dtype == "auto" else STORAGE[config.kv_cache_dtype]
        self.kv = _store(c, config, self.device, stored)
        self.device_pass = device_pass(
            self.decoder, self.kv, self.device, config.max_num_seqs, config.enforce_eager, backend
        )
        """How passes run on a device that works beside the host; None on the CPU."""
        self.host: HostStore | None = None
        """Made when somebody is first swapped out."""
        self._writing: set[int] = set()
        self._driver = (
            nvml.Sampler(uuid=device_peaks.uuid_of(self.device))
            if self.device.type == "cuda"
            else nvml.NOTHING
        )
        self.profile_next = False
        """The next pass is watched: what runs inside it stands in its output."""
        self._draft_model = draft
        self._drafters: dict[tuple[str, int], Drafter] = {}
        if config.speculative == "self-draft":
            self._num_draft_layers(config.draft_layers)
        elif config.speculative == "draft-model":
            self._load_draft_model(progress)
        self._chosen: list[torch.Tensor] = []
        """The experts of the last pass, as the decoder noted them."""

    def _operators(self, config: EngineConfig, shape: ops.Shape) -> tuple[OpSet, Decoder]:
        """The operators that the config asks for, and a decoder on them.

        With `batch_invariant` only what promises it: `auto` falls back to the reference row by row.
        """
        chosen = (
            ops.pick(config.kernels, self.device, shape)
            if not (config.batch_invariant and config.kernels == "reference")
            else ROWWISE
        )
        decoder = self.model.decoder(
            chosen, config.sliding_window, config.precision, config.attention_sinks, device=self.device
        )
        if config.batch_invariant and not decoder.batch_invariant:
            if config.kernels != "auto":
                raise ConfigError(
                    f"batch_invariant is on, but kernels {config.kernels!r} are here {chosen.name} "
                    f"({chosen.about}) and do not promise it: their sums are split by "
                    "the number of rows. Set kernels to 'auto' or 'reference', or turn batch_invariant off."
                )
            chosen = ROWWISE
            decoder = self.model.decoder(
                chosen, config.sliding_window, config.precision, config.attention_sinks, device=self.device
            )
        return chosen, decoder

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.model.eos_token_ids

    @property
    def peaks_name(self) -> str | None:
        """The accelerator that the model runs on, None on a CPU: whose peaks `measure_peaks` finds."""
        return None if self.device.type == "cpu" else device_peaks.name_of(self.device)

    def measure_peaks(self, progress: Callable[[float, str], None] | None = None) -> DeviceSpec:
        """Measures the accelerator's bandwidth and arithmetic in the type that the weights are held in."""
        return device_peaks.measure(
            self.device, torch.float32 if self.config.precision == "exact" else torch.float16, progress
        )

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """One forward pass over all chunks.

        `measured_s` is the wall time of this call; `counted` follows from the shapes.

        Raises RunnerError for a plan that cannot be: nothing is computed then.
        """
        if self.profile_next:
            self.profile_next = False
            watched: tuple[RunnerOutput, StepProfile] = profile.watch(
                lambda: self.execute(plan), self.decoder.whole, self.device
            )
            watched[0].profile = watched[1]
            return watched[0]
        t0 = time.perf_counter()
        if self.device_pass is not None:
            self.device_pass.start()
        for c in plan.chunks:
            self._check(c)
        self._writing = set()
        if not (plan.swaps_in or plan.swaps_out or plan.copies):
            return self._execute(plan, t0)
        self._writing = {d for d, _ in plan.swaps_in} | {d for _, d in plan.copies}
        try:
            spans = self._move(plan, t0)
            begun = time.perf_counter()
            out = self._execute(plan, t0)
            spans.append(Span("pass", begun - t0, time.perf_counter() - t0))
        finally:
            copied = self.host.end() if self.host is not None else []
        out.spans = [*spans, *copied]
        out.measured_s = time.perf_counter() - t0
        if out.device is not None:
            out.device["gap_s"] = max(0.0, out.measured_s - out.device["busy_s"])
        return out

    def _move(self, plan: SchedulerOutput, t0: float) -> list[Span]:
        """Blocks to the host, copies on the device, blocks from the host, each before what may overwrite or
        read it.

        Copies to the host that nobody waits for go on beside the pass.
        """
        if plan.swaps_in or plan.swaps_out:
            if self.host is None:
                self.host = HostStore(self.kv, self.config.swap_blocks)
            if (most := max(h for _, h in (*plan.swaps_in, *plan.swaps_out))) >= self.host.num_blocks:
                raise RunnerError(f"the plan names host block {most}; there are {self.host.num_blocks}")
            size = self.kv.block_size
            # A drafting model writes behind the chunk's tokens, into slots that were taken for it.
            ahead = plan.drafting.num_tokens if plan.drafting is not None else 0
            written = {
                b
                for c in plan.chunks
                for b in c.block_table[c.start // size : (c.start + c.num_tokens - 1 + ahead) // size + 1]
            }
            self.host.begin(plan.swaps_out, plan.swaps_in, written | self._writing, t0)
        spans = []
        if plan.copies:
            begun = time.perf_counter()
            self.kv.copy_blocks(plan.copies)
            if self.device_pass is not None:
                self.device_pass.wait(
                    within=True
                )  # so that the span is the time of copying, not of asking for it
            spans.append(
                Span(
                    "copy",
                    begun - t0,
                    time.perf_counter() - t0,
                    len(plan.copies),
                    float(len(plan.copies) * size_of_block(self.kv)),
                )
            )
        back = {d for d, _ in plan.swaps_in}
        mine = [c for c in plan.chunks if back.intersection(c.block_table)]
        # after a restore, or a step that failed, the host may hold something else: computed again where it
        # does
        if mine:
            self.sync(
                {c.request_id: c.block_table for c in mine}, {c.request_id: c.tokens[: c.start] for c in mine}
            )
        return spans

    def _execute(self, plan: SchedulerOutput, t0: float) -> RunnerOutput:
        there = self.device_pass
        if not plan.chunks and not plan.num_padding_tokens:
            return RunnerOutput(
                {},
                measured_s=time.perf_counter() - t0,
                logprobs={},
                gaps={},
                counted={"flops": 0.0, "weight_bytes": 0.0, "kv_bytes": 0.0},
            )
        blocks, offsets, hashes = self._contents(plan.chunks)
        self._writing |= set(blocks)
        self.kv.clear(blocks, offsets)
        logits = self._forward(plan.chunks, plan.num_padding_tokens)
        sampling = [c for c in plan.chunks if c.sample]
        drawn: list[tuple[int, str, int, Chunk]] = []
        """(row of the logits, who draws, place of its token, chunk): one for each token and one for each
        draft; several sequences may draw from one row.
        """
        candidates = _candidates(sampling, logits)
        num_rows = 0
        for c in sampling:
            place = c.start + c.num_tokens - c.num_draft
            drawn += [(num_rows + i, c.request_id, place + i, c) for i in range(1 + c.num_draft)] + [
                (num_rows, i, place, c) for i in c.fork_ids
            ]
            num_rows += 1 + c.num_draft
        draws = [
            Draw(c.sampling, self.config.seed if c.sampling.seed is None else c.sampling.seed, i, place)
            for _, i, place, c in drawn
        ]
        if len(drawn) > num_rows:
            logits = logits[torch.tensor([row for row, _, _, _ in drawn], device=logits.device)]
        results = sample(logits, draws, self.ops.choose) if there is None else there.sample(logits, draws)
        kept: dict[str, list[Sampled]] = {}
        for (_, i, _, _), r in zip(drawn, results, strict=True):
            kept.setdefault(i, []).append(r)
        rejected: set[tuple[int, int]] = set()
        for c in sampling:
            right = num_accepted(c.draft_token_ids or (), [r.token_id for r in kept[c.request_id]])
            del kept[c.request_id][right + 1 :]
            rejected.update(
                (c.block_table[p // self.kv.block_size], p % self.kv.block_size)
                for p in range(c.start + c.num_tokens - c.num_draft + right, c.start + c.num_tokens)
            )
        if rejected:
            still = [i for i, slot in enumerate(zip(blocks, offsets, strict=True)) if slot not in rejected]
            blocks, offsets, hashes = (
                [blocks[i] for i in still],
                [offsets[i] for i in still],
                [hashes[i] for i in still],
            )
        self.kv.record(blocks, offsets, hashes)
        self._writing = set()
        load, routed = self._who_went_where(plan)
        counted = self._count(plan.chunks, plan.num_padding_tokens, num_rows, load)
        token_ids = {i: [r.token_id for r in mine] for i, mine in kept.items()}
        drafts = self._draft(plan, token_ids, counted)
        measured_s = time.perf_counter() - t0
        return RunnerOutput(
            token_ids,
            draft_ids=drafts,
            measured_s=measured_s,
            device=None
            if there is None or there.busy_s is None
            else {
                "busy_s": there.busy_s,
                "gap_s": max(0.0, measured_s - there.busy_s),
                **self._driver.sample(),
            },
            logprobs={i: [r.logprob for r in mine] for i, mine in kept.items() if i not in candidates},
            gaps={i: [r.gap for r in mine] for i, mine in kept.items() if i not in candidates},
            candidates=candidates,
            counted=counted,
            expert_load=load,
            routed=routed,
        )

    def _draft(
        self, plan: SchedulerOutput, token_ids: dict[str, list[int]], counted: dict[str, float]
    ) -> dict[str, list[int]] | None:
        """Drafts for the next step, where a model makes them; their work is added to `counted`."""
        if plan.drafting is None or plan.drafting.method not in ("self-draft", "draft-model"):
            return None
        drafter = self._drafter(plan.drafting)
        lines = {
            c.request_id: Line(
                c.request_id,
                c.tokens[: c.start + c.num_tokens - c.num_draft] + token_ids.get(c.request_id, []),
                c.block_table,
                c.sampling,
                self.config.seed if c.sampling.seed is None else c.sampling.seed,
            )
            for c in plan.chunks
        }
        wanted = [i for i in lines if i in token_ids]
        with self.device_pass.more() if self.device_pass is not None else nullcontext():
            drafter.follow([line for i, line in lines.items() if i not in token_ids])
            drafts = drafter.propose([lines[i] for i in wanted], plan.drafting.num_tokens)
        for name, n in drafter.counted.items():
            counted[name] += n
            counted[f"draft_{name}"] = n
            drafter.counted[name] = 0.0
        return dict(zip(wanted, drafts, strict=True))

    def _drafter(self, drafting: Drafting) -> Drafter:
        layers = self._num_draft_layers(drafting.num_layers) if drafting.method == "self-draft" else 0
        key = drafting.method, layers
        if key not in self._drafters:
            if layers:
                self._drafters[key] = Drafter(
                    self.decoder.first_layers(layers), self.kv.first_layers(layers), False, self.ops.choose
                )
            else:
                m = self._load_draft_model()
                decoder = m.decoder(
                    self.ops,
                    self.config.sliding_window,
                    self.config.precision,
                    self.config.attention_sinks,
                    device=self.device,
                )
                self._drafters[key] = Drafter(
                    decoder,
                    m.config.store(self.kv.num_blocks, self.kv.block_size, self.device, self.kv.dtype),
                    True,
                    self.ops.choose,
                )
        return self._drafters[key]

    def _num_draft_layers(self, asked: int) -> int:
        """Layers that draft. Raises ConfigError if that would be all of them."""
        have = self.model.config.num_layers
        if asked >= have or have < 2:
            raise ConfigError(
                f"draft_layers is {asked}, the model has {have} layers: fewer of them must draft, at most "
                f"{have - 1}"
            )
        return asked or max(1, have // 3)

    def _load_draft_model(self, progress: Progress | None = None) -> LoadedModel:
        """The second model. Raises ConfigError if it has another vocabulary."""
        if self._draft_model is None:
            self._draft_model = load(self.config.draft_model, progress=progress)
        mine, its = self.model.config.vocab_size, self._draft_model.config.vocab_size
        if mine != its:
            raise ConfigError(
                f"draft_model {self._draft_model.title!r} has a vocabulary of {its}, the model "
                f"{self.model.title!r} one of {mine}: drafts must be tokens of the same "
                "vocabulary. Choose another draft_model, or self-draft"
            )
        return self._draft_model

    def sync(self, tables: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[int]]) -> int:
        """See `Runner.sync`.

        A shared block is computed once. Sampling state needs nothing: it is a function of seed, request and
        position.
        """
        recomputed: set[int] = set()
        size = self.kv.block_size
        for request_id, ids in tokens.items():
            table = list(tables[request_id])
            wanted = np.array(chain_all(ids), dtype=np.int64)
            stale = [
                b
                for b in range((len(ids) + size - 1) // size)
                if table[b] and not self._holds(table[b], wanted[b * size : (b + 1) * size])
            ]
            if not stale:
                continue
            ids = list(ids)
            if 0 in table[: stale[-1]]:
                self._recompute_aside(ids, table, stale)
            else:
                self._recompute(ids, table, stale, self.kv)
            for b in stale:
                at = np.arange(b * size, min((b + 1) * size, len(ids)))
                self.kv.record([table[b]] * len(at), (at % size).tolist(), wanted[at].tolist())
            recomputed.update(table[b] for b in stale)
        if recomputed and self.device_pass is not None:
            self.device_pass.wait(within=True)
        return len(recomputed)

    def damaged_blocks(self) -> set[int]:
        """Blocks that a pass which failed was writing: their contents can't be trusted."""
        return self._writing

    def reset(self) -> None:
        self.kv.reset()
        if self.host is not None:
            self.host.reset()
        for d in self._drafters.values():
            d.kv.reset()
        self._writing = set()

    def alone(
        self,
        request_id: str,
        ids: Sequence[int],
        cuts: Sequence[tuple[int, int]],
        sampling: Sampling,
        places: Sequence[int],
        table: Sequence[int],
        progress: Callable[[float], None] = lambda share: None,
    ) -> Alone:
        """A request's whole life once more, alone: see `divergence.alone`.

        `places`: of the tokens it drew; `table`: where its keys and values lie, or lay.
        """
        size, end = self.kv.block_size, sum(cuts[-1]) if cuts else 0
        wanted = np.array(chain_all(ids[:end]), dtype=np.int64)
        at = np.arange(end)
        rows = np.zeros(end // size + 1, dtype=np.int64)
        rows[: len(table)] = table[: len(rows)]
        held = (rows[at // size] != 0) & (self.kv.ledger[rows[at // size], at % size] == wanted)
        seed = self.config.seed if sampling.seed is None else sampling.seed
        draws = {p: Draw(sampling, seed, request_id, p) for p in places}
        return alone(
            self.decoder,
            ids,
            cuts,
            draws,
            self.kv,
            rows.tolist(),
            held,
            self.kv.like(-(-end // size)),
            progress,
        )

    def step_difference(self, parts: Sequence[tuple[list[int], int, int]], which: int) -> StepDifference:
        """One step's chunk `which` in company and alone: see `divergence.step_difference`."""
        return step_difference(self.decoder, parts, which, self.kv.like, self.kv.block_size)

    def _holds(self, block_id: int, wanted: np.ndarray) -> bool:
        return bool((self.kv.ledger[block_id, : len(wanted)] == wanted).all())

    def _recompute(self, ids: list[int], table: list[int], stale: list[int], kv: KVStore) -> None:
        """Computes the stale blocks of one sequence again, left to right, several blocks a pass."""
        size = kv.block_size
        per_pass = max(1, _SYNC_TOKENS // size)
        for i in range(0, len(stale), per_pass):
            some = stale[i : i + per_pass]
            for b in some:
                n = min(size, len(ids) - b * size)
                kv.clear([table[b]] * n, list(range(n)))
            spans = [(b * size, min(size, len(ids) - b * size)) for b in some]
            joined: list[tuple[int, int]] = []
            for start, n in spans:
                if joined and sum(joined[-1]) == start:
                    joined[-1] = (joined[-1][0], joined[-1][1] + n)
                else:
                    joined.append((start, n))
            self._run([(ids[s : s + n], s, table) for s, n in joined], kv, 0, [])

    def _recompute_aside(self, ids: list[int], table: list[int], stale: list[int]) -> None:
        """The same where blocks left of a sliding window are gone: their keys are needed in lower layers, so
        the sequence is computed in a store of its own.
        """
        kv, size = self.kv, self.kv.block_size
        num = (len(ids) + size - 1) // size
        aside = kv.like(num)
        self._recompute(ids, list(range(num)), list(range(num)), aside)
        for b in stale:
            n = min(size, len(ids) - b * size)
            kv.clear([table[b]] * n, list(range(n)))
            for mine, theirs in zip(kv.parts, aside.parts, strict=True):
                mine[:, :, table[b], :, :n] = theirs[:, :, b, :, :n]

    def _check(self, c: Chunk) -> None:
        end = c.start + c.num_tokens
        known = end - c.num_draft
        drafts = c.draft_token_ids or []
        if c.num_draft and (not c.sample or known != len(c.tokens) or len(drafts) != c.num_draft):
            raise RunnerError(
                f"{c.request_id}: the chunk has {c.num_draft} draft tokens, {len(drafts)} of them named, "
                f"behind {known} of its {len(c.tokens)} tokens: they are "
                "checked behind the last one, where it samples"
            )
        if known <= c.start or c.start < 0 or known > len(c.tokens):
            raise RunnerError(
                f"{c.request_id}: the chunk computes positions {c.start}..{end - 1}, the request has "
                f"{len(c.tokens)} tokens"
            )
        if end > len(c.block_table) * self.kv.block_size:
            raise RunnerError(
                f"{c.request_id}: position {end - 1} lies behind its {len(c.block_table)} blocks of "
                f"{self.kv.block_size}"
            )
        for b in c.block_table[c.start // self.kv.block_size : (end - 1) // self.kv.block_size + 1]:
            if not 0 < b < self.kv.num_blocks:
                raise RunnerError(
                    f"{c.request_id}: block {b} cannot be written; blocks 1..{self.kv.num_blocks - 1} can"
                )
        vocab = self.model.config.vocab_size
        for t in drafts:
            if not -1 <= t < vocab:
                raise RunnerError(f"{c.request_id}: draft {t} is outside the vocabulary, 0..{vocab - 1}")
        for i in range(c.start, known):
            if not 0 <= c.tokens[i] < vocab:
                raise RunnerError(
                    f"{c.request_id}: token id {c.tokens[i]} at position {i} is outside the vocabulary, "
                    f"0..{vocab - 1}"
                )

    def _contents(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int], list[int]]:
        """Which slots this step writes, and what they will hold: block ids, offsets, running hashes.

        A chunk's hashes go on from what the slot before it holds, or will hold after another chunk of this
        step wrote it. Raises RunnerError if that slot will be empty: then attention would read what was never
        computed.
        """
        size = self.kv.block_size
        pending: dict[tuple[int, int], int] = {}
        unresolved: list[Chunk] = []
        for c in chunks:
            before = c.start - 1
            parent = EMPTY
            if c.start:
                where = (c.block_table[before // size], before % size)
                parent = pending.get(where) or int(self.kv.ledger[where])
                if parent == EMPTY:
                    parent = chain_all(c.tokens[: c.start])[-1]
                    if where[0]:  # the null block stands for what a sliding window has left behind
                        unresolved.append(c)
            for p, h in enumerate(chain_all(_token_ids(c), parent), c.start):
                pending[c.block_table[p // size], p % size] = h
        for c in unresolved:
            if (c.block_table[(c.start - 1) // size], (c.start - 1) % size) not in pending:
                raise RunnerError(
                    f"{c.request_id}: the chunk starts at position {c.start}, but the KV of position "
                    f"{c.start - 1} (block {c.block_table[(c.start - 1) // size]}) "
                    "was never computed or was lost; sync the runner first"
                )
        return [b for b, _ in pending], [o for _, o in pending], list(pending.values())

    def _forward(self, chunks: Sequence[Chunk], num_padding: int) -> torch.Tensor:
        ends = np.cumsum([c.num_tokens for c in chunks], dtype=np.int64)
        rows = [
            row
            for i, c in enumerate(chunks)
            if c.sample
            for row in range(int(ends[i]) - 1 - c.num_draft, int(ends[i]))
        ]
        return self._run(
            [(_token_ids(c), c.start, c.block_table) for c in chunks], self.kv, num_padding, rows
        )

    def _run(
        self,
        parts: Sequence[tuple[list[int], int, list[int]]],
        kv: KVStore,
        num_padding: int,
        sample_rows: list[int],
    ) -> torch.Tensor:
        """One pass over parts (token ids, first position, block table); padding is token 0 at position 0,
        computed and not kept.
        """
        if self.device_pass is not None:
            logits = self.device_pass.forward(parts, kv, num_padding, sample_rows)
            self._chosen = self.device_pass.chosen
            return logits
        token_ids = [t for ids, _, _ in parts for t in ids] + [0] * num_padding
        positions = [p for ids, start, _ in parts for p in range(start, start + len(ids))] + [0] * num_padding
        lens = [len(ids) for ids, _, _ in parts]
        batch = Batch.build(
            [table for _, _, table in parts],
            lens,
            [start + n for (_, start, _), n in zip(parts, lens, strict=True)],
            kv.block_size,
            num_padding,
            self.device,
        )
        as_tensor = (
            torch.tensor(x, dtype=torch.int64, device=self.device)
            for x in (token_ids, positions, sample_rows)
        )
        self._chosen = batch.chosen
        return self.decoder.forward(next(as_tensor), next(as_tensor), batch, kv, next(as_tensor))

    def _who_went_where(
        self, plan: SchedulerOutput
    ) -> tuple[list[list[int]] | None, dict[str, list[list[int]]] | None]:
        """Of a mixture's last pass: tokens of each expert, [layer][expert], and of each request that sampled
        the experts of its last token.
        """
        c = self.model.config
        if not c.sparse_layers:
            return None, None
        pieces = len(self._chosen) // len(c.sparse_layers)  # a layer's tokens may come in several
        chosen = (
            torch.stack(
                [torch.cat(self._chosen[i : i + pieces]) for i in range(0, len(self._chosen), pieces)]
            )
            .cpu()
            .numpy()
        )  # [sparse layer, T, K]
        load: list[list[int]] = [[] for _ in range(c.num_layers)]
        for layer, its in zip(c.sparse_layers, chosen, strict=True):
            load[layer] = np.bincount(its.reshape(-1), minlength=c.num_experts).tolist()
        last = np.cumsum([x.num_tokens for x in plan.chunks], dtype=np.int64) - 1
        return load, {
            x.request_id: chosen[:, row].tolist()
            for x, row in zip(plan.chunks, last, strict=True)
            if x.sample
        }

    def _count(
        self, chunks: Sequence[Chunk], num_padding: int, num_sampled: int, load: list[list[int]] | None = None
    ) -> dict[str, float]:
        """Work of this pass, from shapes.

        `flops`: multiplications and additions of the matrix products and of attention over the keys seen.
        `weight_bytes`: each weight read once, the head only if somebody samples, and of the routed experts
        those that some token of this step really took. `kv_bytes`: keys and values that each chunk sees read
        once, those of its tokens written once.
        """
        c, d = self.model.config, self.decoder
        num_tokens = sum(x.num_tokens for x in chunks)
        pairs = seen = 0
        for own in self.decoder.windows:
            window = (
                own + self.decoder.sinks if own else 0
            )  # a query at position p sees min(p + 1, window + sinks) positions
            for x in chunks:
                end = x.start + x.num_tokens
                pairs += _pairs(end, window) - _pairs(x.start, window)
                seen += end - (max(0, x.start - window + 1) if window else 0)
        head = c.hidden_size * c.vocab_size
        attention = 4.0 * c.q_size * pairs
        # decodes in the latent space, chunks with every latent that they see expanded: as the CPU's operators
        # do it
        if c.kv_lora_rank:
            expansion = c.num_heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
            attention = 0.0
            for x in chunks:
                end = x.start + x.num_tokens
                mine = _pairs(end, 0) - _pairs(x.start, 0)
                attention += c.num_layers * c.num_heads * (
                    2.0 * mine * (c.kv_lora_rank + c.latent_size)
                    if x.num_tokens == 1
                    else 2.0 * mine * (c.head_dim + c.v_head_dim)
                ) + (0.0 if x.num_tokens == 1 else 2.0 * c.num_layers * expansion * x.start)
        routed = d.expert_params * c.num_experts_per_tok * len(c.sparse_layers)
        touched = sum(1 for layer in load or () for n in layer if n)
        return {
            "flops": 2.0 * (d.layer_matmul_params + routed) * (num_tokens + num_padding)
            + 2.0 * head * num_sampled
            + attention,
            "weight_bytes": float(
                d.layer_bytes
                + d.expert_bytes * touched
                + d.embed_row_bytes * (num_tokens + num_padding)
                + (d.head_bytes if num_sampled else 0)
            ),
            "kv_bytes": self.kv.bytes_per_token / c.num_layers * seen
            + float(self.kv.bytes_per_token) * num_tokens,
        }


def _candidates(sampling: Sequence[Chunk], logits: torch.Tensor) -> dict[str, list[tuple[int, float]]]:
    """Of each beam the best next tokens and their log-probabilities, best first. logits [rows of the sampling
    chunks, V].
    """
    out: dict[str, list[tuple[int, float]]] = {}
    row = 0
    for c in sampling:
        if c.num_candidates:
            best = torch.log_softmax(logits[row].float(), dim=-1).topk(c.num_candidates)
            out[c.request_id] = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        row += 1 + c.num_draft
    return out


def size_of_block(kv: KVStore) -> int:
    """Bytes of one block in all layers."""
    return kv.bytes_per_token * kv.block_size


def _token_ids(c: Chunk) -> list[int]:
    """What the chunk computes: known tokens, then drafts. A draft that is none is token 0."""
    ids = c.tokens[c.start : c.start + c.num_tokens - c.num_draft]
    return (
        ids + [max(0, t) for t in c.draft_token_ids] if c.num_draft and c.draft_token_ids is not None else ids
    )


def _pairs(length: int, window: int) -> int:
    """Query-key pairs of causal attention over `length` positions."""
    full = min(length, window) if window else length
    return full * (full + 1) // 2 + (length - full) * window


def _store(c: DecoderConfig, config: EngineConfig, device: torch.device, stored: torch.dtype) -> KVStore:
    """The KV memory that the config asks for.

    Raises ConfigError with the bytes where there is not so much.
    """
    token_bytes = c.store(1, 1, "cpu", stored).bytes_per_token
    num_blocks = config.blocks_that_fit(token_bytes)
    needed = num_blocks * config.block_size * token_bytes
    there = (
        psutil.virtual_memory().total
        if device.type == "cpu"
        else torch.cuda.get_device_properties(device).total_memory
    )
    problem = ConfigError(
        f"num_blocks is {num_blocks}: blocks of {config.block_size} tokens, {token_bytes:,} bytes each "
        f"token, need {needed:,} bytes, "
        f"and {'this machine' if device.type == 'cpu' else 'the device'} has {there:,}. Lower num_blocks, "
        "or keep less a token with kv_cache_dtype"
    )
    if needed > there:
        raise problem  # the system might promise it all the same, and end the process when it is used
    try:
        return c.store(num_blocks, config.block_size, device, stored)
    except (MemoryError, torch.OutOfMemoryError):
        raise problem from None


def pick_device(name: str) -> torch.device:
    """The torch device that EngineConfig.device means. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}, it must be auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda', but torch sees no CUDA device here; set device to 'auto' or 'cpu'"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}, it must be auto, cpu or cuda")
    return device
