"""A pool that the machine cannot hold is refused before it is made, with the bytes."""

from __future__ import annotations

import psutil
import pytest

import cbviz as cb
from cbviz.config import ConfigError


def test_a_pool_beyond_the_memory_names_num_blocks_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        total = 10_000_000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    says = r"num_blocks is 4000000: blocks of 16 tokens, [\d,]+ bytes each token, need [\d,]+ bytes, and this machine has 10,000,000\. Lower num_blocks"
    with pytest.raises(ConfigError, match=says):
        cb.Session(None, model="tiny-moe", num_blocks=4_000_000)


def test_memory_that_is_not_given_names_num_blocks_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from cbviz.model.kv_store import KVStore

    made = KVStore._zeros

    def zeros(self: KVStore, *args: object) -> object:
        if self.num_blocks > 1000:
            raise MemoryError
        return made(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(KVStore, "_zeros", zeros)
    with pytest.raises(ConfigError, match=r"num_blocks is 2000: .* need [\d,]+ bytes"):
        cb.Session(None, model="tiny-moe", num_blocks=2000)
