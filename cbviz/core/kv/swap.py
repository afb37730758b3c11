"""Blocks on the host: where a preempted request's KV waits instead of being computed again.

Bookkeeping only; a runner moves the bytes.

    running --preempted, room on the host--> its computed blocks are copied out, num_computed_tokens stays
    waiting --admitted, all blocks free at once--> copied back in (but for those that the prefix cache still
    holds), goes on where it stood

As vLLM's v0 engine did it (`preemption_mode="swap"`, `swap_space`; PagedAttention paper, section 4.5).
Different here: the request waits at its place in the one queue, not in a queue of its own that goes first;
and where the host is full it is recomputed, where vLLM failed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from cbviz import events as ev
from cbviz.core.kv.block_pool import NULL_BLOCK
from cbviz.core.kv.kv_manager import KVManager
from cbviz.core.kv.runs import LONG_LIST, ids_of, runs_of
from cbviz.core.request import Request
from cbviz.messages import SchedulerOutput


class HostPool:
    """Host blocks 0 ..

    `num_blocks` - 1; the one given back last is given out first. Each has one owner: nothing is shared or
    found again here.
    """

    def __init__(self, num_blocks: int, undo: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        self.num_blocks = num_blocks
        self.free = array("i", range(num_blocks - 1, -1, -1))
        self.undo = undo

    def snapshot(self, *, whole: bool = False) -> dict[str, Any]:
        """The free blocks as primitives. `whole`: one by one, however many there are."""
        return (
            {"host_free": list(self.free)}
            if whole or len(self.free) <= LONG_LIST
            else {"host_free_runs": runs_of(self.free)}
        )

    def restore(self, data: dict[str, Any]) -> None:
        """What `snapshot` made; all are free where it was made before there was a host."""
        if "host_free_runs" in data:
            self.free[:] = array("i", ids_of(data["host_free_runs"]))
        else:
            self.free[:] = array("i", data.get("host_free", range(self.num_blocks - 1, -1, -1)))

    def take(self, n: int) -> list[int]:
        """`n` blocks; the caller has checked that they are there."""
        ids = [self.free.pop() for _ in range(n)]
        self.undo.append((self.free.extend, (ids[::-1],)))
        return ids

    def give(self, ids: Sequence[int]) -> None:
        self.free.extend(reversed(ids))
        self.undo.append((_drop_last, (self.free, len(ids))))


def swap_out(
    r: Request, kv: KVManager, host: HostPool, plan: SchedulerOutput
) -> tuple[ev.SwappedOut | None, int]:
    """Plan the copy of `r`'s computed blocks to the host.

    Returns (event, 0), or (None, number of missing host blocks). The caller frees the blocks.

    If a copy into a block is still pending in this step, read from the source of that copy.
    """
    ids = r.block_ids[r.num_null_blocks : -(-r.num_computed_tokens // kv.block_size)]
    if len(ids) > len(host.free):
        return None, len(ids)
    if not ids:
        return None, 0
    to = host.take(len(ids))
    origin = {dst: src for src, dst in kv.copies}
    plan.swaps_out += tuple(zip([origin.get(b, b) for b in ids], to, strict=True))
    return ev.SwappedOut(r.request_id, list(ids), to, r.num_computed_tokens, r.num_null_blocks), 0


def swap_in(r: Request, kv: KVManager, host: HostPool, plan: SchedulerOutput) -> None:
    """Gives `r`, whose table holds what was hit, blocks for the rest of what is on the host, and plans the
    copies. Its host blocks are free then.
    """
    first = r.num_null_blocks
    back = r.host_block_ids[max(0, len(r.block_ids) - first) :]
    kept = len(r.host_block_ids) - len(back)
    ids = kv.grow(r, len(back)) if back else []
    plan.swaps_in += tuple(zip(ids, back, strict=True))
    host.give(r.host_block_ids)
    kv.journal.append(ev.SwappedIn(r.request_id, ids, list(back), kept))
    r.host_block_ids = []


def restored_prefix(r: Request, kv: KVManager) -> list[int]:
    """Blocks that a swapped-out request finds on the device: cached ones from its first on.

    With a window it looks for none: null blocks stand for what has left it.
    """
    return [NULL_BLOCK] * r.num_null_blocks if kv.sliding_window else kv.find_prefix(r)


def _drop_last(ids: array[int], n: int) -> None:
    del ids[len(ids) - n :]
