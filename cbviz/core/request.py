"""A request as the scheduler owns it, and the read-only view that policies get."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from cbviz.config import whole_number
from cbviz.core.fields import Field
from cbviz.messages import RequestSpec, child_spec


class Status(str, Enum):
    """Where a request is.

    Prefill or decode is a question (`num_computed_tokens` against `num_tokens`), not a status.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """Mutable, owned by the scheduler; `spec` is shared by every branch.

    Everything the scheduler does is `num_computed_tokens` catching up with `num_tokens`:

        token_ids   |<----- prompt ----->|<-- outputs -->|
        KV present  |<- cached ->|<- computed ->|
                                                ^ num_computed_tokens
    """

    __slots__ = (
        "arrival_s",
        "beam_score",
        "block_hashes",
        "block_ids",
        "candidates",
        "draft_token_ids",
        "finish_reason",
        "host_block_ids",
        "hypotheses",
        "index",
        "is_beam",
        "is_prefill_chunk",
        "last_wait",
        "latest_end",
        "max_computed",
        "max_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_forks",
        "num_null_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "output_end",
        "overtaken_before",
        "priority",
        "queued_step",
        "rank",
        "request_id",
        "sampling",
        "seat_held",
        "seq",
        "shares_tail",
        "spec",
        "status",
        "stop_ids",
        "surroundings",
        "token_ids",
        "view",
    )

    def __init__(
        self,
        spec: RequestSpec,
        seq: int,
        stop_ids: frozenset[int],
        step: int = 0,
        use_output_len: bool = False,
    ) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.seq = seq
        """Order of arrival: the last tie-break between requests."""
        suffix = spec.request_id[len(spec.parent) + 1 :] if spec.parent else ""
        self.index = whole_number(suffix) or 0
        """Which sequence of its request it is (`Sampling.n`): the tie-break between those, which share their
        order of arrival.
        """
        self.status = Status.WAITING
        self.token_ids: list[int] = list(spec.prompt_token_ids)
        """Prompt and outputs in one list: a chunk is a slice of it."""
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.max_tokens = spec.max_tokens
        self.output_end = (
            spec.output_len
            if use_output_len and spec.output_len is not None and spec.output_len < spec.max_tokens
            else 0
        )
        """Simulated and taped runs: the output ends at this length as if the model had said so; 0: it does
        not end before max_tokens.
        """
        self.latest_end = self.num_prompt_tokens + (self.output_end or spec.max_tokens)
        """Prompt and outputs are never more tokens than this."""
        self.priority = spec.priority
        self.arrival_s = spec.arrival_s
        """On the run's clock; the scheduler sets it for a request that comes by step."""
        self.sampling = spec.sampling
        self.is_beam = spec.sampling.beam_width > 1
        self.stop_ids = (
            frozenset(spec.sampling.stop_token_ids)
            if spec.sampling.ignore_eos
            else stop_ids | frozenset(spec.sampling.stop_token_ids)
        )
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Prefix hit at the last admission."""
        self.num_preemptions = 0
        self.max_computed = 0
        """Most tokens ever computed before a preemption: positions below it are recomputation."""
        self.block_ids: list[int] = []
        self.host_block_ids: list[int] = []
        """Host blocks that hold its computed tokens while it is swapped out, from place `num_null_blocks` on.

        Never changed in place.
        """
        self.num_forks = 0 if spec.parent else max(spec.sampling.n, spec.sampling.beam_width, 1) - 1
        """Sequences still to be forked from it when its prompt is computed."""
        self.shares_tail = False
        """Others may hold its last block too: before it writes there it must look."""
        self.candidates: list[tuple[int, float]] | None = None
        """A beam's best next tokens with their log-probabilities, while it waits for its siblings'.

        Never changed in place.
        """
        self.beam_score = 0.0
        """A beam: log-probability of its output so far."""
        self.hypotheses: list[tuple[float, list[int]]] = []
        """Beam search, kept by sequence 0: finished hypotheses with their scores, best first.

        Never changed in place.
        """
        self.num_null_blocks = 0
        """Places of the table up to here have been emptied by a sliding window, those of its sinks aside."""
        self.block_hashes: list[bytes] = []
        """Chained hashes of the full blocks of `token_ids`, as far as they were asked for."""
        self.num_cached_blocks = 0
        """Leading blocks of the table that carry their hash."""
        self.draft_token_ids: list[int] = []
        """Proposed and not yet checked: the next step that schedules the request computes them behind its
        last token.
        """
        self.is_prefill_chunk = False
        """The last step that scheduled it left known tokens to compute."""
        self.queued_step = step
        self.last_wait: tuple[str, int, int] | None = None
        self.rank: object = 0
        self.seat_held = False
        self.finish_reason = ""
        self.overtaken_before = 0
        """What `num_overtaken` was when the queue's counts began; 0 while it runs."""
        self.surroundings: Surroundings | None = None
        self.view = RequestView(self)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @output_token_ids.setter
    def output_token_ids(self, ids: list[int]) -> None:
        self.token_ids[self.num_prompt_tokens :] = ids

    @property
    def num_overtaken(self) -> int:
        """Later arrivals that were admitted since this one (last) joined the queue."""
        around = self.surroundings
        return around.times_overtaken(self) if around is not None else self.overtaken_before

    @num_overtaken.setter
    def num_overtaken(self, n: int) -> None:
        self.overtaken_before = n

    @property
    def parent(self) -> str:
        """Id of the request whose further sequence this is; '' for a request itself."""
        return self.spec.parent or ""

    @property
    def beam(self) -> list[Any] | None:
        """What only a beam has: its candidates, its score and the finished hypotheses. None: it is no beam."""
        return [self.candidates, self.beam_score, self.hypotheses] if self.is_beam else None

    @beam.setter
    def beam(self, data: list[Any] | None) -> None:
        if data is not None:
            candidates, self.beam_score, hypotheses = data
            self.candidates = None if candidates is None else [(t, x) for t, x in candidates]
            self.hypotheses = [(x, list(tokens)) for x, tokens in hypotheses]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens})"
        )


FIELDS = (
    Field("seq", restore=False),
    Field("parent", restore=False),
    Field("queued_step", undo=True),
    Field("arrival_s", digest=False),
    Field("status", undo=True, write=lambda status: status.value, read=Status),
    Field("output_token_ids"),  # put back token by token where a step is taken back
    Field("num_computed_tokens", undo=True),
    Field("num_cached_tokens", undo=True),
    Field("num_preemptions", undo=True),
    Field("max_computed", undo=True),
    Field("block_ids", write=list, read=list),  # `ControlState.save` keeps its length
    Field("host_block_ids", undo=True, write=list, read=list, older=()),
    Field("num_null_blocks", undo=True),
    Field("num_cached_blocks", undo=True),
    Field("draft_token_ids", undo=True, write=list, read=list),
    Field(
        "last_wait", undo=True, write=lambda w: list(w) if w else None, read=lambda w: tuple(w) if w else None
    ),
    Field("seat_held", undo=True),
    Field("finish_reason", undo=True),
    Field("num_overtaken"),
    Field("overtaken_before", undo=True, snapshot=False),  # stands in `num_overtaken`
    Field("num_forks", undo=True, older=0),
    Field("shares_tail", undo=True, older=False),
    Field("is_prefill_chunk", undo=True, older=False),
    Field("beam", older=None, sparse=True),
    Field("candidates", undo=True, snapshot=False),  # stands in `beam`
    Field("rank", undo=True, snapshot=False),  # the policy says it again
)
"""Every attribute that changes after the request was made, but for those that can be computed again."""


def is_prefill(r: Request) -> bool:
    """It has more than its last token to compute."""
    return len(r.token_ids) - r.num_computed_tokens > 1


def spec_of(request_id: str, parent: str, specs: dict[str, RequestSpec]) -> RequestSpec:
    """The spec of a request that a snapshot names: a child's follows from its parent's."""
    return child_spec(specs[parent], int(request_id[len(parent) + 1 :])) if parent else specs[request_id]


class Surroundings(Protocol):
    """What a request's view may ask of the state around it."""

    step: int
    block_size: int

    def prefix_blocks(self, r: Request) -> list[int]: ...

    def served_tokens(self, session: str | None) -> int: ...

    def times_overtaken(self, r: Request) -> int: ...

    def expert_use(self, r: Request | None) -> tuple[tuple[float, ...], ...]: ...


class RequestView:
    """What a policy may see of a request. Read-only; there is nothing here to change."""

    __slots__ = ("_r",)

    def __init__(self, request: Request) -> None:
        self._r = request

    @property
    def request_id(self) -> str:
        return self._r.request_id

    @property
    def seq(self) -> int:
        """Order of arrival, from 0."""
        return self._r.seq

    @property
    def status(self) -> str:
        return self._r.status.value

    @property
    def priority(self) -> int:
        return self._r.priority

    @property
    def arrival_s(self) -> float:
        return self._r.arrival_s

    @property
    def num_prompt_tokens(self) -> int:
        return self._r.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self._r.num_output_tokens

    @property
    def num_tokens(self) -> int:
        return self._r.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self._r.num_computed_tokens

    @property
    def max_tokens(self) -> int:
        return self._r.max_tokens

    @property
    def output_len(self) -> int | None:
        """The true output length where it is known beforehand (simulated and taped runs), else None."""
        return self._r.spec.output_len

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute: of the known sequence, and of the output up to its known length or
        max_tokens.
        """
        r = self._r
        end = r.spec.output_len if r.spec.output_len is not None else r.max_tokens
        return r.num_prompt_tokens + end - r.num_computed_tokens

    @property
    def num_preemptions(self) -> int:
        return self._r.num_preemptions

    @property
    def queued_step(self) -> int:
        """The step at which it (last) joined the queue."""
        return self._r.queued_step

    @property
    def deadline_s(self) -> float | None:
        return self._r.spec.deadline_s

    @property
    def session(self) -> str | None:
        return self._r.spec.session

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self._r.spec.prompt_token_ids

    @property
    def num_waiting_steps(self) -> int:
        """Steps since it (last) joined the queue."""
        around = self._r.surroundings
        return around.step - self._r.queued_step if around is not None else 0

    @property
    def prefix_block_ids(self) -> tuple[int, ...]:
        """Blocks of its known tokens that the prefix cache holds now, first to last."""
        around = self._r.surroundings
        return tuple(around.prefix_blocks(self._r)) if around is not None else ()

    @property
    def num_prefix_tokens(self) -> int:
        """Leading tokens of it that the prefix cache holds now."""
        around = self._r.surroundings
        return len(around.prefix_blocks(self._r)) * around.block_size if around is not None else 0

    @property
    def session_served_tokens(self) -> int:
        """Tokens computed so far for its session; all requests without a session count as one."""
        around = self._r.surroundings
        return around.served_tokens(self._r.spec.session) if around is not None else 0

    @property
    def expert_use(self) -> tuple[tuple[float, ...], ...]:
        """Of a mixture: which experts the tokens of its session (without one: its own) have taken so far, as
        shares, [sparse layer][expert]. Empty: nothing is known.
        """
        around = self._r.surroundings
        return around.expert_use(self._r) if around is not None else ()

    @property
    def batch_expert_use(self) -> tuple[tuple[float, ...], ...]:
        """The same of all requests that run now."""
        around = self._r.surroundings
        return around.expert_use(None) if around is not None else ()
