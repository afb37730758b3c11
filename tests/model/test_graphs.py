"""Packed inputs, padding, and passes that are recorded once and replayed, on a stand-in for a card."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cbviz.messages import Sampling
from cbviz.model import cpu_ops, device_ops, graphs, ops
from cbviz.model.decoder import Decoder, DecoderConfig, LayerWeights, Weights
from cbviz.model.graphs import DevicePass, InOrder, Part, fill, padded_rows, padded_width, size_of, views
from cbviz.model.hub import ModelError
from cbviz.model.kv_store import KVStore
from cbviz.model.ops import Batch, OpSet
from cbviz.model.sampling import Draw, sample
from tests.device import NoWaiting, Tape

VOCAB = 61


def decoder(operators: OpSet = device_ops.TORCH, window: int = 0) -> Decoder:
    c = DecoderConfig(
        architecture="llama",
        num_layers=2,
        hidden_size=24,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=32,
        vocab_size=VOCAB,
        max_context=256,
        rms_norm_eps=1e-5,
        windows=(0, 0),
    )
    g = torch.Generator().manual_seed(1)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * (0.5 if len(shape) == 2 else 0.2) + (
            0 if len(shape) == 2 else 1
        )

    layers = [
        LayerWeights(w(24), w(c.q_size + 2 * c.kv_size, 24), w(24, c.q_size), w(24), w(64, 24), w(24, 32))
        for _ in range(2)
    ]
    embed = w(VOCAB, 24)
    return Decoder(c, Weights(embed, layers, w(24), embed, c.inverse_frequencies()), operators, window)


def store(num_blocks: int = 64, size: int = 4) -> KVStore:
    return KVStore(2, num_blocks, 2, size, 4)


def device_pass(backend: InOrder | None = None, seats: int = 8, **kwargs: Any) -> DevicePass:
    return DevicePass(
        decoder(kwargs.pop("operators", device_ops.TORCH)), store(), backend or Tape(), seats, **kwargs
    )


# inputs


@pytest.mark.parametrize("seed", range(20))
def test_packed_inputs_are_what_a_batch_is_built_of(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 3, 16])
    parts: list[Part] = []
    for _ in range(rng.randrange(0, 6)):
        n, first = rng.choice([1, 1, 1, 7, 30]), rng.choice([0, 5, 40])
        parts.append(
            (
                [rng.randrange(VOCAB) for _ in range(n)],
                first,
                [rng.randrange(1, 99) for _ in range((first + n) // size + 2)],
            )
        )
    padding = rng.choice([0, 3])
    lens = [len(ids) for ids, _, _ in parts]
    ends = [first + n for (_, first, _), n in zip(parts, lens, strict=True)]
    sizes = (sum(lens) + padding, len(parts), max((-(-e // size) for e in ends), default=1), 2)
    memory = torch.full((size_of(*sizes),), 7, dtype=torch.uint8)
    got = views(memory, *sizes)
    assert all(t.data_ptr() % 16 == memory.data_ptr() % 16 for t in got if t.numel())
    fill(got, parts, [3], size)
    want = Batch.build([list(table) for _, _, table in parts], lens, ends, size, padding)
    for a, b in (
        (got.slots, want.slot_mapping),
        (got.table, want.block_table),
        (got.starts, want.query_start_loc),
        (got.lens, want.seq_lens),
    ):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert got.token_ids.tolist() == [t for ids, _, _ in parts for t in ids] + [0] * padding
    assert (
        got.positions.tolist()
        == [p for (ids, first, _) in parts for p in range(first, first + len(ids))] + [0] * padding
    )
    assert got.rows.tolist() == [3, 0]


def test_rows_beyond_the_step_are_padding_that_writes_nothing_and_reads_the_null_block() -> None:
    sizes = (4, 4, 16, 4)
    got = views(torch.full((size_of(*sizes),), 255, dtype=torch.uint8), *sizes)
    fill(got, [([9], 5, [3, 8])], [0], 4)
    assert (
        got.slots.tolist() == [33, -1, -1, -1]
        and got.lens.tolist() == [6, 1, 1, 1]
        and got.starts.tolist() == [0, 1, 2, 3, 4]
    )
    assert got.table.tolist() == [[3, 8] + [-1] * 14] + 3 * [[0] + [-1] * 15]
    assert got.token_ids.tolist() == [9, 0, 0, 0] and got.positions.tolist() == [5, 0, 0, 0]


def test_sizes_are_rounded_up() -> None:
    assert [padded_rows(n, 64) for n in (1, 2, 3, 8, 9, 33, 64, 65)] == [1, 2, 4, 8, 16, 64, 64, 128]
    assert [padded_rows(n, 20) for n in (3, 16, 17, 20, 21)] == [4, 16, 20, 20, 32]
    assert [padded_width(n) for n in (1, 16, 17, 100)] == [16, 16, 32, 128]


# passes


class Twin:
    """The same sequences on a plain CPU decoder, and on a device pass."""

    def __init__(self, there: DevicePass) -> None:
        self.there, self.plain, self.kv = there, decoder(cpu_ops.CPU), store()
        self.tokens: list[list[int]] = []
        self.tables: list[list[int]] = []
        self.done: list[int] = []
        free = random.Random(0).sample(range(1, 64), 63)
        for i, n in enumerate((5, 1, 9, 3, 12)):
            self.tokens.append([(7 * i + j) % VOCAB for j in range(n)])
            self.tables.append([free.pop() for _ in range(12)])
            self.done.append(0)

    def step(self, who: list[int], budget: int = 99) -> None:
        """One pass over these sequences, both ways: equal logits, and each one's best token is its next."""
        parts: list[Part] = []
        for i in who:
            n = min(budget, len(self.tokens[i]) - self.done[i])
            parts.append((self.tokens[i][self.done[i] : self.done[i] + n], self.done[i], self.tables[i]))
        lens = [len(ids) for ids, _, _ in parts]
        ends = [first + n for (_, first, _), n in zip(parts, lens, strict=True)]
        rows = [int(r) for r in np.cumsum(lens) - 1]
        ids = torch.tensor([t for p in parts for t in p[0]])
        positions = torch.tensor([p for (x, first, _) in parts for p in range(first, first + len(x))])
        batch = Batch.build([list(t) for _, _, t in parts], lens, ends, 4)
        want = self.plain.forward(ids, positions, batch, self.kv, torch.tensor(rows))
        with NoWaiting():
            got = self.there.forward(parts, self.there.kv, 0, rows)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        for a, b in zip(self.there.kv.layers, self.kv.layers, strict=True):
            torch.testing.assert_close(a.k, b.k, atol=1e-5, rtol=1e-5)
        for i, n, best in zip(who, lens, want.argmax(-1).tolist(), strict=True):
            self.done[i] += n
            if self.done[i] == len(self.tokens[i]):
                self.tokens[i].append(best)


def test_replays_with_other_values_are_the_plain_pass() -> None:
    """Batches grow, shrink and change places; sequences get longer than they were when their size was
    recorded.
    """
    tape = Tape()
    there = device_pass(tape)
    twin = Twin(there)
    twin.step([0, 1, 2, 3, 4], budget=4)  # chunks and decodes: eager
    twin.step([0, 2, 4], budget=5)
    twin.step([4], budget=99)
    while twin.done[4] < len(twin.tokens[4]) - 1:
        twin.step([4])
    for who in (
        [0, 1, 2],
        [2, 1, 0],
        [3],
        [0],
        [4, 3, 2, 1, 0],
        [1, 4],
        [0, 1, 2, 3],
        [4, 2, 0],
        [1],
        *([[0, 1, 2, 3, 4]] * 12),
        [3, 1, 0, 2],
    ):
        twin.step(who)
    assert tape.captures == there.counts.captured == 4 == len(there._recorded)  # 1, 2, 4 and 8 rows
    assert there.counts.replayed >= 22 and there.counts.eager_decodes == 0
    assert there.counts.padded_rows == 3 * 13 + 1 + 1 + 1  # 5 of 8 rows thirteen times, 3 of 4 three times
    assert not there.kv.layers[0].k[0].any()  # padding left the null block as it was
    assert there.about.startswith(
        "decode steps replayed from CUDA graphs (rows x blocks: 1 x 16, 2 x 16, 4 x 16, 8 x 16"
    )


def test_a_longer_table_is_another_recording() -> None:
    there = device_pass()
    there.kv = store(200)
    ids = [7 * i % VOCAB for i in range(64)]
    table = list(range(1, 40))
    there.forward([(ids[:63], 0, table)], there.kv, 0, [])
    with NoWaiting():
        there.forward([([1], 63, table)], there.kv, 0, [0])
        got = there.forward([([1], 64, table)], there.kv, 0, [0]).clone()
    torch.testing.assert_close(got, there._eager([([1], 64, table)], there.kv, 0, [0]))
    assert sorted(there._recorded) == [(1, 16), (1, 32)]


def test_only_the_rows_asked_for_come_back() -> None:
    there = device_pass()
    parts: list[Part] = [([i], 0, [i + 1]) for i in range(4)]
    all_rows = there.forward(parts, there.kv, 0, [0, 1, 2, 3]).clone()
    for rows in ([1, 3], [2], [], [3, 0, 1, 2]):
        assert torch.equal(there.forward(parts, there.kv, 0, rows), all_rows[rows])
    assert there.counts.captured == 1


def test_more_rows_than_were_expected_make_room() -> None:
    there = device_pass(seats=2)
    parts: list[Part] = [([i], 0, [40 + i]) for i in range(5)]
    there.forward(parts[:1], there.kv, 0, [0])
    want = there._eager(parts, there.kv, 0, list(range(5)))
    torch.testing.assert_close(there.forward(parts, there.kv, 0, list(range(5))), want)
    assert sorted(there._recorded) == [(1, 16), (8, 16)]
    torch.testing.assert_close(there.forward(parts[3:4], there.kv, 0, [0]), want[3:4])
    assert (
        there.counts.captured == 2
    )  # a card takes no capture into a pool of memory whose recordings have all been dropped


def test_another_store_padding_and_prompts_go_eagerly() -> None:
    there = device_pass()
    one: list[Part] = [([3], 0, [1])]
    there.forward(one, store(), 0, [0])
    there.forward(one, there.kv, 2, [0])
    there.forward([([3, 4], 0, [1])], there.kv, 0, [1])
    there.forward([], there.kv, 3, [])
    assert (there.counts.eager, there.counts.eager_decodes, there.counts.captured) == (4, 0, 0)


# what can't be recorded


def with_attention(attend: Any) -> OpSet:
    return replace(device_ops.TORCH, attention=attend)


def test_an_operator_that_reads_lengths_on_the_host_is_found_out() -> None:
    for read in (max, list, len, bool, torch.tensor, sorted, lambda x: x[0]):

        def attend(
            q: torch.Tensor,
            layer: Any,
            batch: Batch,
            scale: float,
            window: int,
            sinks: int = 0,
            read: Any = read,
        ) -> torch.Tensor:
            read(batch.seq_lens_list)
            return device_ops.attention(q, layer, batch, scale, window)

        there = device_pass(operators=with_attention(attend))
        twin = Twin(there)
        twin.step([1])
        twin.step([1])
        assert (
            "reads the sequences' lengths" in there.about
            and there.counts.eager_decodes == 2
            and not there.counts.captured
        )


def test_a_value_frozen_in_a_recording_would_be_seen() -> None:
    """The stand-in keeps what a CUDA graph keeps: an operator that learns a length in another way than from
    the batch's tensors gives wrong logits from its second replay on.
    """
    lengths = iter(range(1, 100))

    def attend(
        q: torch.Tensor, layer: Any, batch: Batch, scale: float, window: int, sinks: int = 0
    ) -> torch.Tensor:
        return device_ops.attention(q, layer, batch, scale, window) + next(lengths)

    there = device_pass(operators=with_attention(attend))
    there.forward([([1], 0, [1])], there.kv, 0, [0])
    first = there._logits[:1].clone()
    there.forward([([1], 0, [1])], there.kv, 0, [0])
    assert torch.equal(there._logits[:1], first)
    assert not torch.allclose(there._eager([([1], 0, [1])], there.kv, 0, [0]), first)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("operation not permitted when stream is capturing\nmore"),
        torch.OutOfMemoryError("no room"),
        ModelError("no"),
    ],
)
def test_a_capture_that_fails_leaves_the_eager_path_and_the_reason(error: Exception) -> None:
    tape = Tape()
    there = device_pass(tape)
    twin = Twin(there)
    twin.step([1])
    tape.fail = error
    twin.step([1])
    twin.step([0], budget=5)
    twin.step([0, 1])
    twin.step([1])
    assert (
        there.about
        == f"eager, no CUDA graphs: a capture failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    )
    assert not there._recorded and there.counts.captured == 1


def test_what_the_pass_itself_raises_is_raised() -> None:
    def attend(*args: Any, **more: Any) -> torch.Tensor:
        raise MemoryError("no memory")

    there = device_pass(operators=with_attention(attend))
    with pytest.raises(MemoryError):
        there.forward([([1], 0, [1])], there.kv, 0, [0])
    assert not there.refused


@pytest.mark.parametrize(
    "kwargs, said",
    [
        ({"eager": True}, "enforce_eager is on"),
        ({"operators": ops.REFERENCE}, "operators 'reference' cannot be captured"),
    ],
)
def test_no_graphs_where_none_were_wanted_or_possible(kwargs: dict[str, Any], said: str) -> None:
    there = device_pass(**kwargs)
    there.forward([([1], 0, [1])], there.kv, 0, [0])
    assert said in there.about and there.counts.eager_decodes == 1 and there.counts.captured == 0


# tokens


def draws(num: int, warm: list[int]) -> list[Draw]:
    return [
        Draw(Sampling(temperature=1.3, top_k=20, top_p=0.9) if i in warm else Sampling(), 5, f"r{i}", 40 + i)
        for i in range(num)
    ]


@pytest.mark.parametrize("warm", [[], [1, 4], [0, 1, 2, 3, 4]])
def test_tokens_are_chosen_as_on_the_host(warm: list[int]) -> None:
    there = device_pass()
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    with NoWaiting():
        got = there.sample(logits, draws(5, warm))
    want = sample(logits, draws(5, warm))
    assert [s.token_id for s in got] == [s.token_id for s in want]
    assert [x for s in got for x in (s.logprob, s.gap)] == pytest.approx(
        [x for s in want for x in (s.logprob, s.gap)], abs=1e-6
    )
    assert there.counts.waits == 1 and there.counts.transfers == 1 + bool(warm)


def test_logits_that_are_no_numbers_are_told() -> None:
    there = device_pass()
    logits = torch.randn(2, VOCAB)
    logits[1, 3] = float("nan")
    with pytest.raises(ModelError, match="r1: the logits for position 41 are no finite numbers"):
        there.sample(logits, draws(2, []))


def test_a_drawn_row_of_no_numbers_is_told() -> None:
    """No id outside the row is looked up on the way: a card that did it could not be used again."""
    there = device_pass()
    with pytest.raises(ModelError, match="r0: the logits for position 40 are no finite numbers"):
        there.sample(torch.full((1, VOCAB), float("nan")), draws(1, [0]))


def test_a_step_makes_two_transfers_and_one_wait_and_is_timed() -> None:
    there = device_pass()
    parts: list[Part] = [([1], 0, [1]), ([2], 0, [2])]
    for _ in range(3):
        before = (there.counts.transfers, there.counts.waits)
        there.start()
        assert there.busy_s is None
        there.sample(there.forward(parts, there.kv, 0, [0, 1]), draws(2, []))
        assert (there.counts.transfers - before[0], there.counts.waits - before[1]) == (2, 1)
        assert there.busy_s is not None and there.busy_s > 0
    there.start()
    there.forward(parts, there.kv, 0, [])
    there.wait(within=True)  # blocks that were computed again first
    there.sample(there.forward(parts, there.kv, 0, [0, 1]), draws(2, []))
    assert there.counts.waits == 5 and there.busy_s is not None and there.busy_s > 0
    there.start()
    there.sample(
        there.forward(parts, there.kv, 0, []), []
    )  # nobody samples: the step still ends when its work has ended
    assert there.counts.waits == 6 and there.busy_s is not None and there.busy_s > 0
    before_s = there.busy_s
    with there.more():
        time.sleep(0.01)
    assert there.busy_s >= before_s + 0.01


def test_no_pass_beside_the_host_on_a_cpu() -> None:
    assert graphs.device_pass(decoder(), store(), torch.device("cpu"), 8, False) is None


def test_float32_is_float32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        graphs.exact_float32()
        assert torch.get_float32_matmul_precision() == "highest"
        assert (
            not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
            and not torch.backends.cuda.matmul.allow_tf32
        )
    finally:
        torch.set_float32_matmul_precision(before)
