"""Paged attention against float64 at awkward shapes: decodes, few tokens, chunks over cached prefixes,
padding, windows, sinks, empty splits.
"""

from __future__ import annotations

import cbviz.kernels.tiles as tiles
import pytest
import torch
from cases.common import DEVICE, TOLERANCE, Scene, attention, close, codes, kernels, scene

from cbviz.model import ops

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 130)]
MIXED = [(1, 17), (19, 60), (2, 31), (20, 20), (7, 130)]


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """130 keys are three splits, and the short sequences leave most of them empty."""
    monkeypatch.setattr(tiles, "SPLIT_KEYS", 64)


def written(s: Scene, dtype: torch.dtype) -> Scene:
    kernels(dtype).write_kv(s.k, s.v, s.layer, s.batch)
    return s


@pytest.mark.parametrize("shapes", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    "dtype, heads_kv, groups, dim, block_size, window",
    [
        (F32, 1, 1, 32, 16, 0),
        (F32, 2, 3, 64, 8, 20),
        (F32, 1, 7, 128, 16, 0),
        (F32, 1, 1, 80, 32, 5),
        (F16, 2, 3, 64, 16, 0),
        (F16, 1, 7, 80, 8, 40),
        (BF16, 1, 3, 64, 16, 0),
        (BF16, 1, 1, 128, 32, 33),
    ],
)
def test_against_float64(
    dtype: torch.dtype,
    heads_kv: int,
    groups: int,
    dim: int,
    block_size: int,
    window: int,
    shapes: list[tuple[int, int]],
) -> None:
    s = written(scene(shapes, heads_kv * groups, heads_kv, dim, block_size, dtype, window=window), dtype)
    y = kernels(dtype).attention(s.q, s.layer, s.batch, dim**-0.5, window)
    assert y.dtype == dtype
    close(y, attention(s, dim**-0.5, window), TOLERANCE[dtype])
    assert (y[sum(s.batch.query_lens_list) :] == 0).all()
    assert s.intact()


def test_the_reference_says_the_same() -> None:
    """The float64 definition above is that of `ops`."""
    s = written(scene(MIXED, 6, 2, 16, 8, F32, window=20), F32)
    s.batch.block_table = s.batch.block_table.cpu()
    double = type(s.layer)(s.layer.k.double().cpu(), s.layer.v.double().cpu())
    s.batch.query_start_loc, s.batch.seq_lens = s.batch.query_start_loc.cpu(), s.batch.seq_lens.cpu()
    close(
        ops.REFERENCE.attention(s.q.double().cpu(), double, s.batch, 0.25, 20), attention(s, 0.25, 20), 1e-12
    )


@pytest.mark.parametrize("shapes", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    "window, sinks, logits", [(20, 4, False), (70, 17, False), (0, 0, True), (20, 4, True)]
)
def test_sinks(window: int, sinks: int, logits: bool, shapes: list[tuple[int, int]]) -> None:
    s = written(scene(shapes, 6, 2, 64, 16, F32, window=window, sinks=sinks), F32)
    bias = torch.randn(6).to(DEVICE) * 3 if logits else None
    y = kernels().attention(s.q, s.layer, s.batch, 0.125, window, sinks=sinks, sink_logits=bias)
    close(y, attention(s, 0.125, window, sinks, bias), TOLERANCE[F32])


@pytest.mark.parametrize("shapes", [DECODES, MIXED[:3]], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    "storage, dtype, groups, dim",
    [
        (torch.int8, F32, 3, 64),
        (torch.int8, F16, 1, 80),
        (torch.uint8, F32, 3, 64),
        (torch.uint8, F16, 1, 80),
    ],
)
def test_caches_of_codes(
    storage: torch.dtype, dtype: torch.dtype, groups: int, dim: int, shapes: list[tuple[int, int]]
) -> None:
    """Against the reference on the same codes. Unwritten slots have NaN for a scale."""
    s, layer = codes(shapes, 2 * groups, 2, dim, storage)
    want = ops.REFERENCE.attention(
        s.q.cpu(),
        type(layer)(*(x.cpu() if x is not None else None for x in layer)),
        s.batch,
        dim**-0.5,
        40,
        3,
    )
    for name in ("slot_mapping", "block_table", "query_start_loc", "seq_lens"):
        setattr(s.batch, name, getattr(s.batch, name).to(DEVICE))
    close(kernels(dtype).attention(s.q, layer, s.batch, dim**-0.5, 40, 3), want, TOLERANCE[dtype])


def test_one_split_writes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_KEYS", 256)
    s = written(scene(DECODES, 6, 2, 64, 16, F32), F32)
    bias = torch.randn(6).to(DEVICE)
    close(
        kernels().attention(s.q, s.layer, s.batch, 0.125, 0, sink_logits=bias),
        attention(s, 0.125, 0, 0, bias),
        TOLERANCE[F32],
    )


def test_a_row_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: alone (one split, no join), beside a long one (three splits), and however its table is
    padded.
    """
    s = written(scene([(1, 50), (1, 130), (3, 60)], 6, 2, 64, 16, F32, padding=0), F32)
    together = kernels().attention(s.q, s.layer, s.batch, 0.125, 0)
    first = 0
    for table, n, length in zip(s.tables, s.batch.query_lens_list, s.batch.seq_lens_list, strict=True):
        alone = ops.Batch.build([table], [n], [length], 16, device=DEVICE)
        y = kernels().attention(s.q[first : first + n], s.layer, alone, 0.125, 0)
        assert torch.equal(y, together[first : first + n])
        first += n


def test_a_chunk_does_not_depend_on_how_the_prompt_was_cut() -> None:
    s = written(scene([(40, 90)], 6, 2, 64, 16, F32, padding=0), F32)
    whole = kernels().attention(s.q, s.layer, s.batch, 0.125, 0)
    rest = ops.Batch.build(s.tables, [13], [90], 16, device=DEVICE)
    assert torch.equal(kernels().attention(s.q[27:], s.layer, rest, 0.125, 0), whole[27:])


def test_padding_rows_of_a_graph() -> None:
    """A captured batch has more rows than there are sequences: length 0, slot -1, and a table of nothing."""
    s = written(scene([(1, 5), (1, 130), (1, 9)], 6, 2, 64, 16, F32, padding=0), F32)
    want = attention(s, 0.125, 0)
    s.batch.seq_lens[2] = 0
    s.batch.block_table[2] = -1
    y = kernels().attention(s.q, s.layer, s.batch, 0.125, 0)
    close(y[:2], want[:2], TOLERANCE[F32])
    assert (y[2] == 0).all()


def test_long_tables_have_longer_splits() -> None:
    assert (
        tiles.split_keys(64 * 64) == 64 and tiles.split_keys(64 * 64 + 1) == 128 and tiles.split_keys(1) == 64
    )
