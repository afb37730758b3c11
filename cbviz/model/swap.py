"""KV blocks on the host: where they lie, and how they get there and back beside the model's pass.

Owns the host's memory, its ledger and the copying thread (CPU) or stream (CUDA, pinned memory). Knows no
request: pairs of (device block, host block) come in, measured spans go out. The order that a step must keep:

    copier   | urgent out |  in  |  the rest out ...            urgent: blocks that this step overwrites
    model                        | pass ........................|
                          copies ^ on the device                ^ everything has ended

A host block holds one block of every part of the store, side by side, so that a copy is one piece there. What
a block holds is stated by the ledger: cleared before a copy, set after it, as in `kv_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from time import perf_counter

import numpy as np
import torch

from cbviz.messages import Span
from cbviz.model.kv_store import EMPTY, KVStore

AXIS = 2
"""The block axis of each part of the store."""
Pairs = Sequence[tuple[int, int]]
"""(device block, host block)."""


class HostStore:
    """`num_blocks` blocks beside `kv`.

    Memory is taken when it is first written (CPU) or at once, pinned (CUDA).
    """

    def __init__(self, kv: KVStore, num_blocks: int) -> None:
        self.kv = kv
        self.num_blocks = num_blocks
        self.cuda = kv.device.type == "cuda"
        self.parts: list[torch.Tensor] = []
        """One a part of the store, `[num_blocks, *part without its block axis]`."""
        for part in kv.parts:
            shape = (num_blocks, *part.shape[:AXIS], *part.shape[AXIS + 1 :])
            if self.cuda:
                self.parts.append(torch.empty(shape, dtype=part.dtype, pin_memory=True))
            else:
                self.parts.append(torch.from_numpy(np.zeros(shape, dtype=part[:0].numpy().dtype)))
        self.ledger = np.full((num_blocks, kv.block_size), EMPTY, dtype=np.int64)
        self.bytes_per_block = sum(p[0].numel() * p.element_size() for p in self.parts)
        self._stream = torch.cuda.Stream(kv.device) if self.cuda else None
        self._thread = None if self.cuda else ThreadPoolExecutor(1, thread_name_prefix="cbviz-swap")
        self._open: list[
            tuple[str, int, Future[tuple[float, float]] | tuple[torch.cuda.Event, torch.cuda.Event]]
        ] = []
        self._then: list[Callable[[], None]] = []
        self._t0 = 0.0
        self._zero: tuple[torch.cuda.Event, float] | None = None
        """CUDA: a mark that the idle copying stream passed at once, and when that was, in seconds from the
        spans' zero.
        """

    def begin(self, out: Pairs, back: Pairs, overwritten: set[int], t0: float) -> None:
        """Starts the step's copies.

        On return the blocks in `overwritten` and those of `back` may be used; the rest goes on until `end`.
        `t0`: the spans' zero.
        """
        self._t0 = t0
        if self._stream is not None:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(self._stream)
            self._zero = mark, perf_counter() - t0
        urgent = [p for p in out if p[0] in overwritten]
        rest = [p for p in out if p[0] not in overwritten]
        out_hosts = [h for _, h in out]
        if out:
            held = self.kv.ledger[[d for d, _ in out]].copy()
            self.ledger[out_hosts] = EMPTY
        if back:
            self.kv.ledger[[d for d, _ in back]] = EMPTY
        waits = [self._start("swap-out", urgent), self._start("swap-in", back)]
        self._start("swap-out", rest)
        if out:  # not before all copies were begun: the ledger may claim too little, never too much
            self._then.append(lambda: self.ledger.__setitem__(out_hosts, held))
        for w in waits:
            if w is not None:
                self._wait(w)
        if back:
            self.kv.ledger[[d for d, _ in back]] = self.ledger[[h for _, h in back]]

    def end(self) -> list[Span]:
        """Waits for what still goes on.

        Returns the measured spans of this step's copies. Raises what a copy raised, once none goes on.
        """
        spans = []
        opened, then, self._open, self._then = self._open, self._then, [], []
        wait_for([work for _, _, work in opened if isinstance(work, Future)])
        if self._stream is not None:
            self._stream.synchronize()  # also for a copy that could not be begun as a whole
        for what, n, work in opened:
            if isinstance(work, Future):
                start, stop = (at - self._t0 for at in work.result())
            else:
                assert self._zero is not None
                mark, at = self._zero
                start, stop = (at + mark.elapsed_time(event) / 1e3 for event in work)
            spans.append(Span(what, start, stop, n, float(n * self.bytes_per_block)))
        for f in then:
            f()
        return spans

    def reset(self) -> None:
        self.end()
        self.ledger.fill(EMPTY)

    def _start(
        self, what: str, pairs: Pairs
    ) -> Future[tuple[float, float]] | tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if not pairs:
            return None
        work = (
            self._on_stream(what, pairs)
            if self._thread is None
            else self._thread.submit(self._copy, what, list(pairs))
        )
        self._open.append((what, len(pairs), work))
        return work

    def _wait(self, work: Future[tuple[float, float]] | tuple[torch.cuda.Event, torch.cuda.Event]) -> None:
        if isinstance(work, Future):
            work.result()
        else:
            torch.cuda.current_stream(self.kv.device).wait_event(
                work[1]
            )  # the device waits, the host goes on

    def _copy(self, what: str, pairs: Pairs) -> tuple[float, float]:
        """In the copying thread. numpy lets go of the interpreter's lock while it copies, and uses this
        thread alone: the model keeps its own.
        """
        t0 = perf_counter()
        for part, host in zip(self.kv.parts, self.parts, strict=True):
            a, b = np.moveaxis(part.numpy(), AXIS, 0), host.numpy()
            for d, h in pairs:
                if what == "swap-out":
                    np.copyto(b[h], a[d])
                else:
                    np.copyto(a[d], b[h])
        return t0, perf_counter()

    def _on_stream(self, what: str, pairs: Pairs) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """On the copying stream, which first waits for what the model has already been given.

        Blocks are gathered on the device, so that each crosses the link in one piece.
        """
        assert self._stream is not None
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.kv.device))
        with torch.cuda.stream(self._stream):
            first.record()
            # From pinned memory, so that the host does not wait here for the copies before.
            where = torch.tensor([d for d, _ in pairs], pin_memory=True).to(self.kv.device, non_blocking=True)
            for part, host in zip(self.kv.parts, self.parts, strict=True):
                if what == "swap-out":
                    gathered = part.index_select(AXIS, where).movedim(AXIS, 0).contiguous()
                    for i, (_, h) in enumerate(pairs):
                        host[h].copy_(gathered[i], non_blocking=True)
                else:
                    staged = torch.stack([host[h].to(self.kv.device, non_blocking=True) for _, h in pairs])
                    part.index_copy_(AXIS, where, staged.movedim(0, AXIS))
            last.record()
        return first, last
