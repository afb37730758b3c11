"""What crosses a boundary between parts: requests in, plans to the runner, tokens back, step records out.

Types only; no behaviour beyond validation. Positions start at 0; `_s` is seconds, `_bytes` bytes, `num_` a
count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cbviz.config import ConfigError, clean_text, shown
from cbviz.events import AnyEvent


class RequestError(ValueError):
    """A request cannot be taken. The message names the field, the value and the limit."""


MOST_WHOLE = 2**63 - 1
"""Greatest whole number anywhere in a request: what a file of ours can hold."""
MAX_SEQUENCES = 4096
"""Greatest `Sampling.n`: each sequence needs a seat, and there are at most so many."""
MAX_BEAM_WIDTH = 16
MAX_ID_CHARACTERS = 1000
"""Length of a request's id, which stands in every event about it."""


def _whole(who: str, field: str, value: Any, least: int = -MOST_WHOLE, most: int = MOST_WHOLE) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{who}{field} must be a whole number, got {shown(value)}")
    if value < least:
        raise RequestError(f"{who}{field} is {shown(value)}, the least is {least}")
    if value > most:
        raise RequestError(f"{who}{field} is {shown(value)}, the most is {most}")


def _number(who: str, field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{who}{field} must be a number, got {shown(value)}")
    if isinstance(value, int) and abs(value) > MOST_WHOLE:
        raise RequestError(f"{who}{field} is {shown(value)}, the most is {MOST_WHOLE}")


def _seconds(who: str, field: str, value: Any) -> None:
    _number(who, field, value)
    if not math.isfinite(value) or value < 0:
        raise RequestError(f"{who}{field} is {value}, it must be a finite number of seconds, 0 or more")


def _token_ids(who: str, field: str, value: Any) -> None:
    """Raises RequestError unless `value` is a tuple of whole numbers that a file of ours can hold."""
    if not isinstance(value, tuple):
        raise RequestError(f"{who}{field} must be a tuple of token ids, got {shown(value)}")
    if value and set(map(type, value)) != {int}:
        raise RequestError(
            f"{who}{field} must be a tuple of token ids, got "
            f"{shown(next(t for t in value if type(t) is not int))} among them"
        )
    if value and not -MOST_WHOLE <= min(value) <= max(value) <= MOST_WHOLE:
        raise RequestError(
            f"{who}{field} holds {shown(next(t for t in value if abs(t) > MOST_WHOLE))}, the most is "
            f"{MOST_WHOLE}"
        )


def _cleaned(struct: msgspec.Struct, fields: Sequence[str]) -> None:
    """Replaces lone surrogates in text fields of a frozen struct: no file and no tokenizer takes them."""
    for field in fields:
        value = getattr(struct, field)
        if isinstance(value, str) and not value.isascii() and (clean := clean_text(value)) is not value:
            msgspec.structs.force_setattr(struct, field, clean)


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a token is chosen from the logits.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch these off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    """None: the run's seed."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    """Sequences from one prompt, which is computed once.

    Sequence 0 keeps the request's id, sequence i is `ID.i` and draws as a request of that id would: what it
    says is what a request `ID.i` with the same prompt says. All need a seat at once; their outputs are
    reserved, where a discipline does so, for sequence 0 alone.
    """
    beam_width: int = 0
    """Beam search with so many beams (2 to 16), `ID` and `ID.i`; 0 or 1: off.

    At the end they hold the best hypotheses, best first.
    """
    length_penalty: float = 1.0
    """A finished hypothesis is ranked by its log-probability / length ** length_penalty: above 0 favours long
    ones.
    """
    early_stopping: bool = False
    """End as soon as `beam_width` hypotheses are finished.

    False: when, in addition, none that goes on is better at its present length.
    """

    def __post_init__(self) -> None:
        for field in ("temperature", "top_p"):
            _number("", field, getattr(self, field))
        _whole("", "top_k", self.top_k)
        _whole("", "n", self.n, 1, MAX_SEQUENCES)
        _whole("", "beam_width", self.beam_width, 0, MAX_BEAM_WIDTH)
        _number("", "length_penalty", self.length_penalty)
        if self.seed is not None:
            _whole("", "seed", self.seed)
        _token_ids("", "stop_token_ids", self.stop_token_ids)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {shown(self.ignore_eos)}")
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise RequestError(f"temperature is {self.temperature}, it must lie in 0..100")
        if not isinstance(self.early_stopping, bool):
            raise RequestError(
                f"early_stopping must be true or false, got {shown(self.early_stopping)}: transformers' "
                "other rule, 'never', is not there"
            )
        if not math.isfinite(self.length_penalty):
            raise RequestError(f"length_penalty is {self.length_penalty}, it must be finite")
        if self.beam_width > 1:
            for field, off in (("n", 1), ("temperature", 0), ("top_k", 0), ("top_p", 1)):
                if (value := getattr(self, field)) != off:
                    raise RequestError(
                        f"{field} is {value} and beam_width {self.beam_width}: beam search draws nothing, "
                        f"set {field} to {off} or beam_width to 0"
                    )
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}, the least is 0 (off)")
        if not (math.isfinite(self.top_p) and 0 < self.top_p <= 1):
            raise RequestError(f"top_p is {self.top_p}, it must lie in (0, 1]")


class RequestSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was asked. Immutable and shared by every branch of a run."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0
    arrival_step: int | None = None
    """Arrives just before this step, whatever the clock says (lessons, conformance, imports).

    The first step is 1; 0 means the same.
    """
    priority: int = 0
    """Smaller goes first."""
    sampling: Sampling = Sampling()
    output_len: int | None = None
    """Known output length, for simulated and taped runs (None: runs to max_tokens)."""
    prompt: str | None = None
    """The text the ids came from, if any; only shown."""
    deadline_s: float | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    session: str | None = None
    parent: str | None = None
    """The request whose prompt this sequence was forked from (`Sampling.n`)."""
    output_lens: tuple[int | None, ...] = ()
    """Known lengths of sequences 1 on (`Sampling.n`), as `output_len` is sequence 0's; empty: as that one's.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise RequestError(f"request_id must be text, got {shown(self.request_id)}")
        if not self.request_id:
            raise RequestError("request_id is empty")
        if self.parent is None and len(self.request_id) > MAX_ID_CHARACTERS:
            raise RequestError(
                f"request_id has {len(self.request_id)} characters, the most is {MAX_ID_CHARACTERS}"
            )
        for field in ("prompt", "session", "parent"):
            if not isinstance(getattr(self, field), (str, type(None))):
                raise RequestError(f"{field} must be text, got {shown(getattr(self, field))}")
        _cleaned(self, ("request_id", "prompt", "session", "parent"))
        who = f"{self.request_id}: "
        _token_ids(who, "prompt_token_ids", self.prompt_token_ids)
        if not self.prompt_token_ids:
            raise RequestError(f"{who}the prompt is empty; it needs at least 1 token")
        _whole(who, "max_tokens", self.max_tokens, 1)
        _seconds(who, "arrival_s", self.arrival_s)
        _whole(who, "priority", self.priority)
        if self.arrival_step is not None:
            _whole(who, "arrival_step", self.arrival_step, 0)
        if self.output_len is not None:
            _whole(who, "output_len", self.output_len, 1)
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"{who}sampling must be a Sampling, got {shown(self.sampling)}")
        if not isinstance(self.output_lens, tuple):
            raise RequestError(f"{who}output_lens must be a tuple of lengths, got {shown(self.output_lens)}")
        if self.output_lens:
            if len(self.output_lens) != self.sampling.n - 1:
                raise RequestError(
                    f"{who}output_lens has {len(self.output_lens)} lengths, n is {self.sampling.n}: it "
                    "must have one for each sequence but the first"
                )
            for length in self.output_lens:
                if length is not None:
                    _whole(who, "output_lens", length, 1)
        for field in ("deadline_s", "ttft_slo_s", "tpot_slo_s"):
            if (value := getattr(self, field)) is not None:
                _seconds(who, field, value)


def child_spec(spec: RequestSpec, i: int) -> RequestSpec:
    """Sequence `i` of the request, from 1 on, as a request of its own."""
    length = spec.output_lens[i - 1] if spec.output_lens else spec.output_len
    return msgspec.structs.replace(
        spec,
        request_id=f"{spec.request_id}.{i}",
        parent=spec.request_id,
        sampling=msgspec.structs.replace(spec.sampling, n=1),
        output_len=length,
        output_lens=(),
    )


def sequence_ids(spec: RequestSpec) -> list[str]:
    """Ids of all sequences of the request, its own first."""
    return [
        spec.request_id,
        *(f"{spec.request_id}.{i}" for i in range(1, max(spec.sampling.n, spec.sampling.beam_width))),
    ]


class Chunk:
    """One request's share of one step.

    `tokens` is the request's own list (prompt + outputs) and `block_table` its own table: read-only views,
    valid until `Scheduler.update`. The chunk computes positions `start .. start + num_tokens - 1`; the last
    `num_draft` of them are `draft_token_ids`, which do not stand in `tokens`. If `sample`, the logits of the
    last position (and of each draft) yield tokens.
    """

    __slots__ = (
        "block_table",
        "draft_token_ids",
        "fork_ids",
        "num_candidates",
        "num_draft",
        "num_tokens",
        "request_id",
        "sample",
        "sampling",
        "start",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        start: int,
        num_tokens: int,
        tokens: list[int],
        block_table: list[int],
        sample: bool,
        sampling: Sampling,
        num_draft: int = 0,
        draft_token_ids: list[int] | None = None,
    ) -> None:
        self.request_id = request_id
        self.start = start
        self.num_tokens = num_tokens
        self.tokens = tokens
        self.block_table = block_table
        self.sample = sample
        self.sampling = sampling
        self.num_draft = num_draft
        self.draft_token_ids = draft_token_ids
        self.fork_ids: Sequence[str] = ()
        """Sequences that are forked from this one in this step: each gets a token of its own from the logits
        of the last position.
        """
        self.num_candidates = 0
        """A beam: so many of the best next tokens are asked for, with their log-probabilities, and no token
        is chosen.
        """

    def __repr__(self) -> str:
        return f"Chunk({self.request_id}, {self.start}+{self.num_tokens}, sample={self.sample})"


class Drafting(NamedTuple):
    """How drafts are to be proposed after this step's tokens, where the runner does it."""

    method: str
    """`EngineConfig.speculative`."""
    num_tokens: int
    """Drafts for each request, at most."""
    num_layers: int = 0
    """self-draft: layers that draft, 0: the runner's choice."""
    acceptance: float = 1.0
    """Runs with made-up drafts: chance that one is right, given that those before it were."""


class SchedulerOutput:
    """One step's plan, all that a runner needs. Built once a step; its views are valid until `update`."""

    __slots__ = (
        "block_size",
        "chunks",
        "copies",
        "drafting",
        "finished_ids",
        "num_padding_tokens",
        "preempted_ids",
        "step",
        "swaps_in",
        "swaps_out",
    )

    def __init__(self, step: int, block_size: int = 0) -> None:
        self.step = step
        self.block_size = block_size
        """Tokens in one block: what a copied or swapped block amounts to."""
        self.chunks: list[Chunk] = []
        self.copies: tuple[tuple[int, int], ...] = ()
        """(source block, destination block), done before anything is computed."""
        self.swaps_in: tuple[tuple[int, int], ...] = ()
        """(device block, host block): copied to the device after `swaps_out` and `copies`, before anything is
        computed.
        """
        self.swaps_out: tuple[tuple[int, int], ...] = ()
        """(device block, host block): copied to the host as they were before this step; nothing of the step
        may write them before.
        """
        self.num_padding_tokens = 0
        """Tokens computed only because rows are padded to one length (static-padded prefill)."""
        self.finished_ids: list[str] = []
        """Requests that ended since the last plan: a runner may forget them."""
        self.preempted_ids: list[str] = []
        self.drafting: Drafting | None = None
        """None: no drafts are wanted."""

    @property
    def num_tokens(self) -> int:
        return sum(c.num_tokens for c in self.chunks)


class RunnerOutput:
    """What a runner gives back: for each sampling chunk its new tokens (1 + accepted drafts)."""

    __slots__ = (
        "candidates",
        "counted",
        "device",
        "draft_ids",
        "expert_load",
        "gaps",
        "logprobs",
        "measured_s",
        "profile",
        "routed",
        "spans",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: dict[str, list[int]],
        *,
        draft_ids: dict[str, list[int]] | None = None,
        measured_s: float | None = None,
        logprobs: dict[str, list[float]] | None = None,
        gaps: dict[str, list[float]] | None = None,
        expert_load: list[list[int]] | None = None,
        counted: dict[str, float] | None = None,
        device: dict[str, float] | None = None,
        profile: StepProfile | None = None,
        routed: dict[str, list[list[int]]] | None = None,
        spans: list[Span] | None = None,
        candidates: dict[str, list[tuple[int, float]]] | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.candidates = candidates or {}
        """Of each beam that sampled: its `num_candidates` best next tokens, best first, with their natural
        log-probabilities.
        """
        self.spans = spans or []
        """Copies of blocks and the pass beside them, measured."""
        self.draft_ids = draft_ids
        """Drafts for the next step; None: this runner proposes none, and a proposer that needs only tokens
        may.
        """
        self.measured_s = measured_s
        """Wall time of the forward pass and sampling, None if nothing was measured."""
        self.logprobs = logprobs
        """Natural log-probability of each chosen token."""
        self.gaps = gaps
        """Log-probability of the chosen token's best rival below it, as a distance in nats (best minus
        second): ties are visible.
        """
        self.expert_load = expert_load
        """Of a mixture: how many of the step's tokens (padding included) each expert got, [layer][expert]; an
        empty list for a layer without experts.
        """
        self.routed = routed
        """Of a mixture: for each request that sampled, the experts that its last token took, [sparse
        layer][choice].
        """
        self.counted = counted
        """Counted work of the real pass: `flops`, `weight_bytes`, `kv_bytes`."""
        self.device = device
        """What was measured on an accelerator, see `StepRecord.device`."""
        self.profile = profile
        """What ran inside this pass, where it was asked for."""


class StepProfile(msgspec.Struct, frozen=True, omit_defaults=True):
    """What ran inside one step's pass, measured: each operator or kernel once, in the order of its start.

    `source`: who took the times. `names`: of operators or kernels. The others have one entry a span: index of
    its name, start and duration in seconds from the start of the pass, and the lane it stands in (a stream,
    or the depth of a call inside another). `lanes`: what the lanes are.
    """

    source: str
    names: list[str]
    name: list[int]
    start_s: list[float]
    duration_s: list[float]
    lane: list[int]
    lanes: list[str]
    total_s: float = 0.0
    """Wall time of the pass while it was profiled: longer than usual."""


class Span(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One piece of a step's time, in seconds from the start of its pass: `what` is `swap-out`, `swap-in`,
    `copy` (blocks on the device) or `pass` (the model).

    Spans may lie side by side: a swap-out goes on while the model computes.
    """

    what: str
    start_s: float
    end_s: float
    num_blocks: int = 0
    bytes: float = 0.0


class StepCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """Work and modelled time of one step, SI units.

    The times are lower bounds: nothing can be faster on that device.
    """

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    decode_flops: float = 0.0
    decode_kv_bytes: float = 0.0
    """Of `flops` and `kv_bytes`, those of rows that computed one position (or a draft after it): the rest is
    prefill.
    """
    compute_s: float = 0.0
    memory_s: float = 0.0
    overhead_s: float = 0.0
    total_s: float = 0.0
    swap_in_s: float = 0.0
    """Copies from the host, which the pass waits for; in `total_s`."""
    swap_out_s: float = 0.0
    """Copies to the host, beside the pass; what is longer counts."""


class ChunkRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A chunk as a value. `kind`: `prefill` (the request had no output yet or is recomputing) or `decode`."""

    request_id: str
    start: int
    num_tokens: int
    kind: str
    num_draft: int = 0
    sample: bool = False
    num_recomputed: int = 0
    """How many of these positions had been computed before a preemption."""
    padding: bool = False


class TokenAccount(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Tokens computed in a step: `total` = useful + recomputed + padded + rejected, exactly.

    `rejected` are drafts whose token is not in the output: the model chose another, or the request had ended.
    """

    total: int = 0
    useful: int = 0
    recomputed: int = 0
    padded: int = 0
    rejected: int = 0


class SlotAccount(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Token slots of the pool while the step ran: `total` = used + partly_empty + reserved + cached + free +
    fragmented, exactly.

    `used` hold a token's KV; `partly_empty` are the rest of blocks in use; `reserved` are whole blocks taken
    ahead of need; `cached` are blocks nobody refers to that can still be hit; `free` are the others. Under
    contiguous reservation all free blocks are `fragmented` while the head of the queue waits because no run
    of them is long enough. The null block is left out.
    """

    total: int = 0
    used: int = 0
    partly_empty: int = 0
    reserved: int = 0
    cached: int = 0
    free: int = 0
    fragmented: int = 0


class Gauges(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Counts at the end of the step."""

    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_free_blocks: int = 0
    """Blocks with no reference, cached ones included (vLLM's meaning)."""
    num_cached_blocks: int = 0
    """Of these, the ones that can still be hit."""
    num_saved_blocks: int = 0
    """Blocks more that would be in use if nobody shared any: each block counts once less than it has holders.
    """
    num_host_blocks: int = 0
    """Host blocks that hold the KV of requests swapped out."""


class StepRecord(msgspec.Struct, omit_defaults=True):
    """One line of a trace: all that a step did, as values. It never shows a later state.

    Steps are counted from 1: record N leads from cursor N - 1 to cursor N, "N steps done".
    """

    step: int
    t0_s: float
    t1_s: float
    clock: str
    """`measured` or `modelled`."""
    chunks: list[ChunkRecord]
    events: list[AnyEvent]
    tokens: TokenAccount = TokenAccount()
    slots: SlotAccount = SlotAccount()
    gauges: Gauges = Gauges()
    cost: StepCost | None = None
    """Work and lower bounds from the cost model (of the machine itself under a measured clock)."""
    measured_s: float | None = None
    counted: dict[str, float] | None = None
    expert_load: list[list[int]] | None = None
    """Of a mixture: tokens (padding included) of each expert, [layer][expert]; an empty list for a layer
    without experts.
    """
    routed: dict[str, list[list[int]]] | None = None
    """Of a mixture: for each request that sampled, the experts of its last token, [sparse layer][choice]."""
    device: dict[str, float] | None = None
    """Measured on an accelerator in this step: `busy_s` (kernels ran), `gap_s` (the rest of `measured_s`: it
    waited for the host), and what its driver sampled last: `gpu_share` and `memory_share` (of NVML's last
    sampling period, 0..1), `power_w`, `clock_hz`, `memory_bytes` (in use on the device).
    """
    profile: StepProfile | None = None
    """What ran inside this step's pass, if somebody asked for it."""
    logprobs: dict[str, list[float]] | None = None
    gaps: dict[str, list[float]] | None = None
    arrivals: list[RequestSpec] = []
    """Requests delivered to the scheduler at the start of this step, by the workload or by the user."""
    inputs: list[dict[str, Any]] = []
    """What the user did just before this step, in order: `{"op": "add" | "abort" | "configure", ...}`, enough
    to do it again.
    """
    texts: dict[str, list[str]] | None = None
    """The words of the tokens sampled in this step, where a tokenizer is at hand: what each token added to
    the request's text.
    """
    spans: list[Span] = []
    """Copies of blocks and the pass they lie beside, in steps that swap or copy; measured or modelled as
    `clock` says.
    """
    num_padding_tokens: int = 0
    schedule_s: float | None = None
    """Wall time of schedule() + update(): the control plane's own cost, where measured."""
    replica: int = 0
    carry: dict[str, Any] = {}
    """What the scheduler's next step builds on and no event tells (`batch_open`, `new_token_ratio`), for
    replays.
    """


__all__ = [
    "AnyEvent",
    "Chunk",
    "ChunkRecord",
    "ConfigError",
    "Drafting",
    "Gauges",
    "RequestError",
    "RequestSpec",
    "RunnerOutput",
    "Sampling",
    "SchedulerOutput",
    "SlotAccount",
    "Span",
    "StepCost",
    "StepProfile",
    "StepRecord",
    "TokenAccount",
    "child_spec",
    "sequence_ids",
]
