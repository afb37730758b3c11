"""Several sequences of one request (`Sampling.n`): forked from its prompt's blocks, shared until somebody
writes.

    r1     |<-- full blocks, shared: reference count 3 -->|<- last block, partly filled: shared too ->|
    r1.1   the same table                                  the first two that write copy it,
    r1.2   the same table                                  the last one writes in place

The request itself is sequence 0 and computes the prompt; the others come to life in the step that ends it,
with a token each from the same row of logits (PagedAttention paper, section 4.4). From then on each is a
request like any other: it has a seat, ends, waits and loses its blocks alone, because nothing in one sequence
depends on another. (vLLM's v0 engine preempted such a group as a whole, and could only swap it.) Aborting the
request ends them all.
"""

from __future__ import annotations

from cbviz.core.request import Request


def seats_to_come(running: list[Request]) -> int:
    """Seats that the children of running requests will take: they are kept free for them."""
    return sum(r.num_forks for r in running)
