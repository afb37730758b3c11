"""Several sequences of one request (`Sampling.n`): forked from its prompt's blocks, shared until somebody
writes.

    r1     |<-- full blocks, shared: reference count 3 -->|<- last block, partly filled: shared too ->|
    r1.1   the same table                                  the first two that write copy it, the last one writes in place
    r1.2   the same table

The request itself is sequence 0 and computes the prompt; the others come to life in the step that ends it,
with a token each from the same row of logits (PagedAttention paper, section 4.4). From then on each is a
request like any other: it has a seat, ends, waits and loses its blocks alone, because nothing in one sequence
depends on another. (vLLM's v0 engine preempted such a group as a whole, and could only swap it.) Aborting the
request ends them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbviz import events as ev
from cbviz.core.request import Request, Status
from cbviz.messages import RequestSpec, child_spec

if TYPE_CHECKING:
    from cbviz.core.scheduler import Scheduler


def fork(s: Scheduler, r: Request, num_tokens: int) -> list[Request]:
    """The children of `r`, which has computed the `num_tokens` tokens of its prompt: seated behind it,
    sharing the blocks that hold them. Their first tokens are still to come.
    """
    ids = r.block_ids[: -(-num_tokens // s.block_size)]
    children = []
    at = s.running.index(r) + 1
    for i in range(1, r.num_forks + 1):
        c = Request(child_spec(r.spec, i), r.seq, s.eos_token_ids, r.queued_step, s.use_output_len)
        c.surroundings, c.arrival_s = s, r.arrival_s
        c.status, c.rank = Status.RUNNING, r.rank
        c.block_hashes = list(r.block_hashes[: num_tokens // s.block_size])
        c.num_computed_tokens = num_tokens
        c.num_cached_blocks, c.num_null_blocks = (
            min(r.num_cached_blocks, num_tokens // s.block_size),
            r.num_null_blocks,
        )
        c.block_ids = list(ids)
        c.shares_tail, c.is_prefill_chunk = True, False
        s.pool.touch(ids, c.request_id)
        s.requests[c.request_id] = c
        children.append(c)
    s.running[at:at] = children
    r.num_forks, r.shares_tail = 0, True
    s.journal.append(ev.Forked(r.request_id, [c.request_id for c in children], list(ids), num_tokens))
    return children


def seats_to_come(running: list[Request]) -> int:
    """Seats that the children of running requests will take: they are kept free for them."""
    return sum(r.num_forks for r in running)


def spec_of(request_id: str, parent: str, specs: dict[str, RequestSpec]) -> RequestSpec:
    """The spec of a request that a snapshot names: a child's follows from its parent's."""
    return child_spec(specs[parent], int(request_id[len(parent) + 1 :])) if parent else specs[request_id]
