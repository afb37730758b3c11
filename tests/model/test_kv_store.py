"""The ledger says what the slots hold, and never more."""

from __future__ import annotations

import torch

from cbviz.model.kv_store import EMPTY, KVStore, chain, chain_all


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
    """MLA: what is kept is the latent and the rotated part of the key; values are the latent itself, not a second copy."""
    kv = KVStore(num_layers=2, num_blocks=5, num_kv_heads=1, block_size=4, head_dim=8, latent_dim=6)
    assert kv.layers[1].k.shape == (5, 1, 4, 8) and kv.layers[1].v.shape == (5, 1, 4, 6)
    assert kv.bytes_per_token == 2 * 8 * 4 and kv.num_bytes == kv.bytes_per_token * 5 * 4
    kv.layers[1].k[3, 0, 2] = torch.arange(8.0)
    assert kv.layers[1].v[3, 0, 2].tolist() == [0, 1, 2, 3, 4, 5] and not kv.layers[0].k.any()
    kv.record([3], [2], [9])
    kv.copy_blocks([(3, 1)])
    assert kv.layers[1].v[1, 0, 2, 5] == 5 and kv.ledger[1].tolist() == [0, 0, 9, 0]
    small = kv.like(2)
    assert small.layers[0].v.shape == (2, 1, 4, 6) and small.bytes_per_token == kv.bytes_per_token and not small.ledger.any()
