"""Passes on a device that works beside the host: packed inputs, decode steps recorded once and replayed, one
wait a step.

Owns what goes over to the device and back, and the recorded passes; knows no requests and no scheduler. What
differs between a real card and a stand-in (staging memory, events, recording) is a `Backend`: the logic above
it runs, and is tested, without a card.

A step on the device:

    host    pack ids, positions, slots, tables into one pinned buffer | launch | ... | wait for the results
    copy    ->  one transfer in                                                     one transfer out  ->
    device                                             pass, choice of tokens

A pass over decodes alone is replayed from a CUDA graph. Its key is (rows, width of the block table), both
rounded up, so a few graphs serve all steps. A replay repeats the recorded kernels on the recorded addresses:
inputs lie in buffers that stay where they are, and rows beyond the step's own are padding: token 0 at
position 0, slot -1 (nothing is written), one key read in the null block (finite, and nobody looks at the
result). Everything else runs kernel by kernel ("eager"), and so does all of it where a capture fails; `about`
says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import numpy as np
import torch

from cbviz.model import ops as reference
from cbviz.model.hub import ModelError
from cbviz.model.kv_store import KVStore
from cbviz.model.ops import Batch
from cbviz.model.sampling import Draw, Sampled, checked, draw_rows, uniform

if TYPE_CHECKING:
    from cbviz.model.decoder import Decoder

Part = tuple[Sequence[int], int, Sequence[int]]
"""One sequence's share of a pass: token ids, position of the first, block table."""
LEAST_WIDTH = 16
"""Blocks in the narrowest table of a recorded pass."""
_ROOM = 256
"""Rows of logits that are set aside at once where there are so many seats: more make room when they come."""
_ALIGN = 16
"""Every section of the packed inputs begins on a multiple of this: Triton compiles for aligned addresses."""


class Event(Protocol):
    """A mark in the device's work."""

    def record(self) -> None:
        """Sets the mark behind all work launched so far."""

    def wait(self) -> None:
        """Holds the host until the mark is reached."""

    def seconds_since(self, earlier: Event) -> float:
        """Device time between two marks that have been reached."""


class Backend(Protocol):
    """What a device needs beside torch's operators."""

    device: torch.device

    def enter(self) -> None:
        """Work is about to be launched from this thread, which need not be the one of the last time."""

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Bytes of host memory that transfers leave and reach while the host goes on.

        A new one each time: the last may still be under way.
        """

    def event(self) -> Event: ...

    def warm(self, work: Callable[[], None]) -> None:
        """Runs `work` once as a capture will see it, so that what is made on first use is made."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records the kernels that `work` launches, without running them.

        The result launches them all, on the same addresses.
        """


class CudaEvent:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Cuda:
    """A CUDA card. All recorded passes share one pool of memory: one runs at a time, and none leaves a result
    in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enter()
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def enter(self) -> None:
        if self.device.index is not None:
            torch.cuda.set_device(self.device)  # where Triton launches; each thread has its own

    def staging(self, num_bytes: int) -> torch.Tensor:
        # torch keeps pinned memory for reuse, and does not give a piece out again before the transfers from
        # and to it are done.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        return CudaEvent(self.device)

    def warm(self, work: Callable[[], None]) -> None:
        here = torch.cuda.current_stream(self.device)
        self._side.wait_stream(here)
        try:
            with torch.cuda.stream(self._side):
                work()
        finally:
            # Also where it raised: what it had launched still reads memory that is about to be given to
            # others.
            here.wait_stream(self._side)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: where a capture breaks, its exit raises before it puts the stream back.
        with torch.cuda.stream(self._side):
            # Other threads of a notebook's kernel may use the card meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                try:
                    graph.capture_end()
                except RuntimeError:
                    pass  # a capture that broke; what broke it is raised
                raise
            graph.capture_end()
        torch.cuda.synchronize(self.device)
        return graph.replay


class InOrderEvent:
    def __init__(self) -> None:
        self._at_s = 0.0

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, InOrderEvent)
        return self._at_s - earlier._at_s


class InOrder:
    """A stand-in for a card, on the CPU: all that is launched is done at once, in order, and a recording is
    the work itself. For tests and dry runs.
    """

    device = torch.device("cpu")

    def enter(self) -> None:
        pass

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> Event:
        return InOrderEvent()

    def warm(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


class HostReadError(RuntimeError):
    """An operator read on the host what changes from replay to replay."""


class _Unknown:
    """The lengths of a pass that is being recorded.

    No list: C code would read a list's items without asking it.
    """

    def _refuse(self, *args: object) -> NoReturn:
        raise HostReadError("an operator reads the sequences' lengths on the host")

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = _refuse


class Inputs(NamedTuple):
    """The integers of one pass, views of one piece of memory.

    T tokens, S sequences, W blocks in the widest table, R rows whose logits are asked for.
    """

    token_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64"""
    slots: torch.Tensor
    """[T] int64, -1: not written"""
    rows: torch.Tensor
    """[R] int64"""
    table: torch.Tensor
    """[S, W] int32, -1: no block"""
    starts: torch.Tensor
    """[S + 1] int32"""
    lens: torch.Tensor
    """[S] int32"""


def size_of(tokens: int, sequences: int, width: int, rows: int) -> int:
    """Bytes of `Inputs` of these sizes."""
    return sum(_aligned(n) for n in _sections(tokens, sequences, width, rows))


def views(memory: torch.Tensor, tokens: int, sequences: int, width: int, rows: int) -> Inputs:
    """The sections of `memory` [bytes] uint8."""
    at, out = 0, []
    for i, n in enumerate(_sections(tokens, sequences, width, rows)):
        out.append(memory[at : at + n].view(torch.int64 if i < 4 else torch.int32))
        at += _aligned(n)
    out[4] = out[4].view(sequences, width)
    return Inputs(*out)


def _sections(tokens: int, sequences: int, width: int, rows: int) -> tuple[int, ...]:
    return (
        8 * tokens,
        8 * tokens,
        8 * tokens,
        8 * rows,
        4 * sequences * width,
        4 * (sequences + 1),
        4 * sequences,
    )


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def fill(to: Inputs, parts: Sequence[Part], rows: Sequence[int], block_size: int) -> None:
    """Writes the parts into host memory.

    Tokens beyond theirs are padding: id 0, position 0, slot -1. Sequences beyond theirs are rows of one such
    token each.
    """
    ids, positions, slots, wanted, table, starts, lens = (x.numpy() for x in to)
    table.fill(-1)
    at = 0
    starts[0] = 0
    for i, (tokens, first, blocks) in enumerate(parts):
        n = len(tokens)
        end = first + n
        used = -(-end // block_size)
        table[i, :used] = blocks[:used]
        ids[at : at + n] = tokens
        if n == 1:
            positions[at] = first
            slots[at] = blocks[first // block_size] * block_size + first % block_size
        else:
            pos = np.arange(first, end)
            positions[at : at + n] = pos
            slots[at : at + n] = table[i, pos // block_size].astype(np.int64) * block_size + pos % block_size
        at += n
        starts[i + 1], lens[i] = at, end
    ids[at:], positions[at:], slots[at:] = 0, 0, -1
    rest = len(lens) - len(parts)
    if rest:
        table[len(parts) :, 0] = 0
        lens[len(parts) :] = 1
        starts[len(parts) + 1 :] = np.arange(at + 1, at + rest + 1)
    wanted[: len(rows)] = rows
    wanted[len(rows) :] = 0


def padded_rows(n: int, seats: int) -> int:
    """The rows of the recorded pass that serves `n`: the next power of two, or all seats where those are
    enough and fewer.
    """
    power = 1 << (n - 1).bit_length()
    return seats if n <= seats < power else power


def padded_width(blocks: int) -> int:
    return max(LEAST_WIDTH, 1 << (blocks - 1).bit_length())


@dataclass(slots=True)
class _Recorded:
    """A pass that was recorded: its inputs' place on the device, and what launches it."""

    memory: torch.Tensor
    replay: Callable[[], None]
    logits: torch.Tensor
    """Where it leaves them."""
    order: torch.Tensor
    """The rows that it samples: read by the recording, so it must stay where it is."""


@dataclass(slots=True)
class Counts:
    """How passes ran, since the runner was made."""

    captured: int = 0
    replayed: int = 0
    eager: int = 0
    eager_decodes: int = 0
    """Of the eager ones, those that a graph could have served had there been one."""
    waits: int = 0
    """Times the host waited for the device."""
    transfers: int = 0
    """Copies from host to device and back."""
    padded_rows: int = 0
    """Rows computed in replays only because a graph has more rows than the step."""
    capture_s: float = 0.0
    """Wall time that captures took, their warm-up included."""


class DevicePass:
    """`Decoder.forward` and the choice of tokens on one device.

    `seats`: the most sequences expected in a step; `kv`: the store that recorded passes use.
    """

    def __init__(
        self, decoder: Decoder, kv: KVStore, backend: Backend, seats: int, eager: bool = False
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.backend = backend
        self.seats = seats
        self.counts = Counts()
        self.refused = ""
        """Why no pass is recorded; '' if they are."""
        if eager:
            self.refused = "enforce_eager is on"
        elif not decoder.ops.capturable:
            self.refused = f"operators {decoder.ops.name!r} cannot be captured"
        elif decoder.whole is not None:
            self.refused = f"operators {decoder.ops.name!r} run the whole pass in one call"
        elif decoder.config.sparse_layers:
            self.refused = "in a mixture of experts the host looks who went where"
        elif decoder.config.kv_lora_rank:
            self.refused = "MLA reads its latents sequence by sequence"
        self.chosen: list[torch.Tensor] = []
        """Of a mixture: the experts of the last pass, as `Batch.chosen` has them."""
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._logits = torch.empty(0)
        self._timing = False
        self._begin: Event | None = None
        self._end: Event | None = None
        self.busy_s: float | None = None
        """Device time of the step that was last waited for: from its first transfer to its last kernel, and
        of what was added since. None: it was not measured.
        """

    @property
    def about(self) -> str:
        """One line for people: how decode steps run."""
        if self.refused:
            return f"eager, no CUDA graphs: {self.refused}"
        keys = ", ".join(f"{rows} x {width}" for rows, width in sorted(self._recorded))
        return (
            f"decode steps replayed from CUDA graphs (rows x blocks: {keys})"
            if keys
            else "decode steps replayed from CUDA graphs, captured when first needed"
        )

    def forget(self) -> None:
        """Drops the recorded passes and their memory."""
        self._recorded.clear()
        self._logits = torch.empty(0)

    def start(self) -> None:
        """A step begins: it is timed from its first transfer on."""
        self._timing, self._begin, self._end, self.busy_s = True, None, None, None

    # the pass -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self, parts: Sequence[Part], kv: KVStore, num_padding: int, rows: Sequence[int]
    ) -> torch.Tensor:
        """Launches one pass over the parts and returns logits [R, vocab] float32 on the device, valid until
        the next pass. `rows`: tokens whose logits are wanted.
        """
        self.backend.enter()
        if kv is self.kv and parts and not num_padding and all(len(ids) == 1 for ids, _, _ in parts):
            logits = self._decodes(parts, rows) if not self.refused else None
            if logits is not None:
                return logits
            self.counts.eager_decodes += 1
        self.counts.eager += 1
        return self._eager(parts, kv, num_padding, rows)

    def _eager(
        self, parts: Sequence[Part], kv: KVStore, num_padding: int, rows: Sequence[int]
    ) -> torch.Tensor:
        lens = [len(ids) for ids, _, _ in parts]
        ends = [first + n for (_, first, _), n in zip(parts, lens, strict=True)]
        width = max((-(-end // kv.block_size) for end in ends), default=1)
        sizes = (sum(lens) + num_padding, len(parts), width, len(rows))
        staged = self.backend.staging(size_of(*sizes))
        fill(views(staged, *sizes), parts, rows, kv.block_size)
        there = views(
            self._send(staged, torch.empty(len(staged), dtype=torch.uint8, device=self.backend.device)),
            *sizes,
        )
        batch = Batch(there.slots, there.table, there.starts, there.lens, lens, ends, kv.block_size)
        logits = self.decoder.forward(there.token_ids, there.positions, batch, kv, there.rows)
        self.chosen = batch.chosen
        return logits

    def _send(self, staged: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        if self._timing and self._begin is None:
            self._begin = self.backend.event()
            self._begin.record()
        self.counts.transfers += 1
        return to.copy_(staged, non_blocking=True)

    def _decodes(self, parts: Sequence[Part], rows: Sequence[int]) -> torch.Tensor | None:
        """A pass over decodes alone from a recording, which is made if it is the first of its size.

        None: it could not be made.
        """
        kv, n = self.kv, len(parts)
        key = (
            padded_rows(n, self.seats),
            padded_width(max(first // kv.block_size + 1 for _, first, _ in parts)),
        )
        sizes = (key[0], *key, key[0])
        staged = self.backend.staging(size_of(*sizes))
        fill(views(staged, *sizes), parts, rows, kv.block_size)
        recorded = self._recorded.get(key)
        memory = (
            torch.empty(len(staged), dtype=torch.uint8, device=self.backend.device)
            if recorded is None
            else recorded.memory
        )
        self._send(staged, memory)
        if recorded is None:
            recorded = self._record(key, views(memory, *sizes), memory)
            if recorded is None:
                return None
        recorded.replay()
        self.counts.replayed += 1
        self.counts.padded_rows += key[0] - n
        logits = recorded.logits[:n]
        if len(rows) == n and all(r == i for i, r in enumerate(rows)):
            return logits
        return logits.index_select(0, views(memory, *sizes).rows[: len(rows)])

    def _record(self, key: tuple[int, int], inputs: Inputs, memory: torch.Tensor) -> _Recorded | None:
        """Runs the pass once for warmth (it computes this very step, and the replay computes it again), then
        records it.
        """
        num, kv = key[0], self.kv
        if len(self._logits) < num:
            # Results lie outside the recordings' shared memory. Earlier recordings keep the smaller buffer.
            self._logits = torch.empty(
                max(num, min(self.seats, _ROOM)), self.decoder.config.vocab_size, device=self.backend.device
            )
        logits = self._logits[:num]
        order = torch.arange(num, device=self.backend.device)

        def work() -> None:
            batch = Batch(
                inputs.slots,
                inputs.table,
                inputs.starts,
                inputs.lens,
                [1] * num,
                _Unknown(),  # type: ignore[arg-type]
                kv.block_size,
                captured=True,
            )
            logits.copy_(self.decoder.forward(inputs.token_ids, inputs.positions, batch, kv, order))

        t0 = time.perf_counter()
        try:
            self.backend.warm(work)
        except (HostReadError, torch.OutOfMemoryError) as e:
            self.refused = str(e).splitlines()[0]
            return None
        try:
            replay = self.backend.capture(work)
        except (RuntimeError, ModelError) as e:
            self.forget()
            self.refused = (
                f"a capture failed: {type(e).__name__}: "
                f"{str(e).splitlines()[0] if str(e) else 'no reason given'}"
            )
            return None
        recorded = self._recorded[key] = _Recorded(memory, replay, logits, order)
        self.counts.captured += 1
        self.counts.capture_s += time.perf_counter() - t0
        return recorded

    # tokens -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sampled]:
        """As `sampling.sample`, chosen on the device; one transfer brings the results, and the host waits for
        them.
        """
        if not draws:
            self.wait()
            return []
        ops = self.decoder.ops
        best = (ops.choose_on_device or reference.choose_on_device)(logits)
        ids = best[:, 0].long()
        warm = [i for i, d in enumerate(draws) if d.sampling.temperature > 0]
        if warm:
            staged = self.backend.staging(40 * len(warm))
            numbers = staged.view(torch.float64).view(5, -1)
            # Whole numbers up to 2^53 are exact.
            numbers.copy_(
                torch.tensor(
                    [
                        [i, s.temperature, s.top_k, s.top_p, uniform(d.seed, d.request_id, d.position)]
                        for i in warm
                        for d in [draws[i]]
                        for s in [d.sampling]
                    ],
                    dtype=torch.float64,
                ).t()
            )
            row, temperature, top_k, top_p, chance = (
                self._send(staged, torch.empty(len(staged), dtype=torch.uint8, device=self.backend.device))
                .view(torch.float64)
                .view(5, -1)
            )
            row = row.long()
            ids = ids.index_copy(
                0,
                row,
                (ops.draw or draw_rows)(
                    logits.index_select(0, row), temperature, top_k.long(), top_p, chance
                ),
            )
        values = logits.gather(-1, ids[:, None])[:, 0]
        packed = torch.cat((ids.double()[:, None], best[:, 1:], values.double()[:, None]), dim=1)
        if self._begin is not None:
            self._end = self.backend.event()
            self._end.record()
        back = self.backend.staging(packed.numel() * 8)
        self.counts.transfers += 1
        back.view(torch.float64).view(-1, 4).copy_(packed, non_blocking=True)
        self.wait()
        return checked(
            [
                Sampled(int(i), value - total, lead)
                for i, lead, total, value in back.view(torch.float64).view(-1, 4).tolist()
            ],
            draws,
        )

    def wait(self, within: bool = False) -> None:
        """Waits for all that was launched; the one synchronisation of a step, which ends it and sets
        `busy_s`. `within`: the step goes on.
        """
        done = self.backend.event()
        done.record()
        done.wait()
        self.counts.waits += 1
        if not within:
            self.busy_s = (self._end or done).seconds_since(self._begin) if self._begin is not None else None
            self._timing, self._begin, self._end = False, None, None

    @contextmanager
    def more(self) -> Iterator[None]:
        """Around work behind the step's wait (drafts of a model): its time on the device is added to
        `busy_s`, from its first kernel to its last.
        """
        begin, end = self.backend.event(), self.backend.event()
        begin.record()
        yield
        end.record()
        end.wait()
        if self.busy_s is not None:
            self.busy_s += end.seconds_since(begin)


def card(device: torch.device) -> str:
    """A CUDA device in words: name, compute capability, memory."""
    p = torch.cuda.get_device_properties(device)
    return f"{p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"


def no_card() -> str:
    """Why torch sees no CUDA card."""
    return "no card that torch can use" if torch.version.cuda else "this torch is built without CUDA"


def exact_float32() -> None:
    """Sees to it that float32 products are float32 (no TF32), and that 16-bit ones add up in float32.

    Settings of torch, for the whole process.
    """
    if torch.get_float32_matmul_precision() != "highest":
        torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def device_pass(
    decoder: Decoder,
    kv: KVStore,
    device: torch.device,
    seats: int,
    eager: bool,
    backend: Backend | None = None,
) -> DevicePass | None:
    """The pass for a device that works beside the host, None for the CPU, where torch's calls are done when
    they return.
    """
    if backend is None:
        if device.type != "cuda":
            return None
        backend = Cuda(device)
    return DevicePass(decoder, kv, backend, seats, eager)


__all__ = [
    "Backend",
    "Counts",
    "Cuda",
    "DevicePass",
    "Event",
    "HostReadError",
    "InOrder",
    "Inputs",
    "card",
    "device_pass",
    "exact_float32",
    "fill",
    "no_card",
    "padded_rows",
    "padded_width",
    "size_of",
    "views",
]
