"""The ledger says what the slots hold, and never more."""

from __future__ import annotations

import pytest
import torch

from cbviz.model.kv_store import EMPTY, STORAGE, KVStore, chain, chain_all, dequantise, hadamard, quantise


def store() -> KVStore:
    return KVStore(num_layers=2, num_blocks=5, num_kv_heads=3, block_size=4, head_dim=8)


def test_sizes() -> None:
    kv = store()
    assert kv.layers[1].k.shape == (5, 3, 4, 8) and kv.layers[1].v.dtype == torch.float32
    assert kv.bytes_per_token == 2 * 2 * 3 * 8 * 4
    assert kv.num_bytes == kv.bytes_per_token * 5 * 4
    assert all(layer.k.is_contiguous() and layer.v.is_contiguous() for layer in kv.layers)


def test_chain_names_a_whole_prefix() -> None:
    a, b = chain_all([5, 6, 7]), chain_all([5, 6, 7, 8])
    assert a == b[:3] and chain(a[-1], 8) == b[3]
    assert len({*chain_all([5, 6, 7]), *chain_all([6, 5, 7]), *chain_all([0, 0, 0])}) == 9
    assert chain_all([7], parent=a[1]) == [a[2]]
    assert EMPTY not in chain_all(range(5000)) and chain_all([]) == []


def test_ledger() -> None:
    kv = store()
    kv.record([3, 3, 1], [0, 1, 2], [10, 11, 12])
    assert kv.hash_at([2, 3], 4) == 10 and kv.hash_at([2, 3], 5) == 11 and kv.hash_at([1], 2) == 12
    assert kv.hash_at([2, 3], 6) == EMPTY
    kv.clear([3], [0])
    assert kv.hash_at([3], 0) == EMPTY and kv.hash_at([3], 1) == 11
    kv.reset()
    assert not kv.ledger.any()


def test_copies_take_contents_and_ledger_in_order() -> None:
    kv = store()
    for b in range(5):
        kv.layers[1].k[b] = b
        kv.layers[1].v[b] = -b
    kv.record([1, 1], [0, 3], [7, 8])
    kv.record([4], [1], [9])
    kv.copy_blocks([(1, 4), (4, 2)])
    for b in (4, 2):
        assert (kv.layers[1].k[b] == 1).all() and (kv.layers[1].v[b] == -1).all()
        assert kv.ledger[b].tolist() == [7, 0, 0, 8]


def test_latent_layout_keeps_one_vector_a_token() -> None:
    """MLA: what is kept is the latent and the rotated part of the key; values are the latent itself, not a
    second copy.
    """
    kv = KVStore(num_layers=2, num_blocks=5, num_kv_heads=1, block_size=4, head_dim=8, latent_dim=6)
    assert kv.layers[1].k.shape == (5, 1, 4, 8) and kv.layers[1].v.shape == (5, 1, 4, 6)
    assert kv.bytes_per_token == 2 * 8 * 4 and kv.num_bytes == kv.bytes_per_token * 5 * 4
    kv.layers[1].k[3, 0, 2] = torch.arange(8.0)
    assert kv.layers[1].v[3, 0, 2].tolist() == [0, 1, 2, 3, 4, 5] and not kv.layers[0].k.any()
    kv.record([3], [2], [9])
    kv.copy_blocks([(3, 1)])
    assert kv.layers[1].v[1, 0, 2, 5] == 5 and kv.ledger[1].tolist() == [0, 0, 9, 0]
    small = kv.like(2)
    assert (
        small.layers[0].v.shape == (2, 1, 4, 6)
        and small.bytes_per_token == kv.bytes_per_token
        and not small.ledger.any()
    )


@pytest.mark.parametrize(
    "name, per_head", [("float32", 32), ("float16", 16), ("int8", 8 + 2), ("int4", 4 + 4)]
)
def test_codes_and_scales_count_and_are_copied(name: str, per_head: int) -> None:
    kv = KVStore(num_layers=2, num_blocks=5, num_kv_heads=3, block_size=4, head_dim=8, dtype=STORAGE[name])
    assert kv.bytes_per_token == 2 * 2 * 3 * per_head and kv.num_bytes == kv.bytes_per_token * 5 * 4
    parts = [x for x in kv.layers[1][:6] if x is not None]
    assert [x.shape[:3] for x in parts] == [(5, 3, 4)] * (2 if per_head > 10 else 4 if name == "int8" else 6)
    assert kv.quantised == (name in ("int8", "int4")) and (kv.layers[0].rotation is not None) == (
        name == "int4"
    )
    for i, x in enumerate(parts, 3):
        x[1] = i
    kv.record([1], [2], [7])
    kv.copy_blocks([(1, 4)])
    assert all((x[4] == i).all() for i, x in enumerate(parts, 3)) and kv.ledger[4].tolist() == [0, 0, 7, 0]
    assert {p.shape[2] for p in kv.parts} == {5} and sum(p.nbytes for p in kv.parts) == kv.num_bytes
    small = kv.like(2)
    assert small.num_bytes == 2 * 4 * kv.bytes_per_token and small.dtype == kv.dtype


@pytest.mark.parametrize("name, levels", [("int8", 254), ("int4", 15)])
def test_a_code_is_the_nearest(name: str, levels: int) -> None:
    """Each number lies within half a level of what is read back, a level being the vector's range over the
    number of levels (float16 rounding of scale and zero aside).
    """
    x = (
        torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-3, 3, 50)[:, None, None]
    )
    codes, scale, zero = quantise(x, STORAGE[name])
    assert (
        codes.shape == (50, 3, 16 if name == "int8" else 8)
        and scale.shape == (50, 3)
        and (zero is None) == (name == "int8")
    )
    span = 2 * x.abs().amax(-1) if name == "int8" else x.amax(-1) - x.amin(-1)
    off = (dequantise(codes, scale, zero) - x).abs().amax(-1) / (span / levels)
    assert 0.3 < off.max() < 0.52
    assert (scale.float() / (span / levels) - 1).abs().max() < 1e-2


def test_codes_of_what_has_no_range() -> None:
    for storage in (torch.int8, torch.uint8):
        assert not dequantise(*quantise(torch.zeros(2, 8), storage)).any()
        assert (dequantise(*quantise(torch.full((2, 8), 3.0), storage)) - 3).abs().max() < 1e-2
        assert (dequantise(*quantise(torch.full((2, 8), 1e-7), storage)) - 1e-7).abs().max() < 1e-6
    low = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 15])
    assert quantise(low, torch.uint8)[0].tolist() == [0 | 4 << 4, 1 | 5 << 4, 2 | 6 << 4, 3 | 15 << 4]


@pytest.mark.parametrize("dim", [2, 8, 12, 64, 80])
def test_the_rotation_keeps_products(dim: int) -> None:
    r = hadamard(dim)
    torch.testing.assert_close(r @ r, torch.eye(dim))
    assert torch.equal(r, r.T)
    spike = torch.zeros(dim)
    spike[0] = 1
    assert int((spike @ r != 0).sum()) == dim & -dim


def test_codes_of_a_latent_are_refused() -> None:
    with pytest.raises(ValueError, match="latent"):
        KVStore(1, 2, 1, 4, 8, dtype=torch.int8, latent_dim=6)
