"""Swapping on the real engine: the tokens of a run that recomputes, nothing computed twice, measured copies beside the pass, and what a failure leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cbviz import events as ev
from cbviz.config import EngineConfig
from cbviz.model.kv_store import KVStore
from cbviz.model.swap import HostStore
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from tests.runners.test_contiguous import SPECS
from tests.runners.test_torch_runner import MODEL


def session(**fields: Any) -> Session:
    config = {"num_blocks": 26, "block_size": 4, "max_model_len": 64, "max_num_seqs": 6, "precision": "exact", "clock": "measured", "discipline": "vllm", **fields}
    return Session(SPECS, runner=TorchRunner(MODEL, EngineConfig(**config)), **config)


def outputs(s: Session) -> dict[str, list[int]]:
    return {i: s.request(i).output_token_ids for i in s.request_ids}


@pytest.mark.parametrize("caching", [False, True])
def test_tokens_are_those_of_recomputing(caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, s = session(enable_prefix_caching=caching), session(enable_prefix_caching=caching, preemption_mode="swap")
    monkeypatch.setattr(s.runner, "_recompute", lambda *a: pytest.fail("a swap brought something else back, so it was computed again"))
    plain.run()
    s.run()
    assert outputs(s) == outputs(plain)
    assert any(r.tokens.recomputed for r in plain.trace) and not any(r.tokens.recomputed for r in s.trace)
    swaps = [x for r in s.trace for x in r.spans]
    assert {x.what for x in swaps} == {"swap-out", "swap-in", "pass"}
    block_bytes = 4 * s.runner.kv.bytes_per_token  # type: ignore[attr-defined]
    for r in s.trace:
        (whole,) = [x for x in r.spans if x.what == "pass"] or [None]
        for x in r.spans:
            assert 0 <= x.start_s <= x.end_s <= (r.measured_s or 0)
            if x.what == "swap-in":
                assert whole is not None and x.end_s <= whole.start_s  # before it is read
            if x.what != "pass":
                assert x.bytes == x.num_blocks * block_bytes
        assert sum(x.num_blocks for x in r.spans if x.what == "swap-out") == sum(len(e.block_ids) for e in r.events if isinstance(e, ev.SwappedOut))


def test_after_a_rewind_the_host_is_filled_again_by_computing() -> None:
    s = session(preemption_mode="swap")
    s.run(until=lambda record, state: any(isinstance(e, ev.SwappedOut) for e in record.events))
    away = len(s.trace)
    s.run()
    want = outputs(s)
    b = s.fork(at=away)  # its runner's host memory is new and empty
    b.run()
    assert outputs(b) == want
    s.rewind(away)
    s.run()
    assert outputs(s) == want


def test_a_failed_step_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    want = session(preemption_mode="swap")
    want.run()
    s = session(preemption_mode="swap")
    runner = s.runner
    assert isinstance(runner, TorchRunner)
    forward, failures = runner._forward, []

    def breaks(chunks: Any, num_padding: int) -> torch.Tensor:
        if runner._writing and runner.host is not None and runner.host._open and len(failures) < 3:
            failures.append(1)
            raise OSError("power")
        return forward(chunks, num_padding)

    monkeypatch.setattr(runner, "_forward", breaks)
    while not s.done:
        try:
            s.step()
        except OSError:
            continue
    assert len(failures) == 3 and outputs(s) == outputs(want)


def test_the_order_of_a_steps_copies() -> None:
    """One step sends block 1 out, fills it from the host and sends block 2 out: what arrives is what was there before."""
    kv = KVStore(2, 4, 1, 2, 3)
    for b in range(4):
        kv._data[:, :, b] = b
        kv.ledger[b] = 10 + b
    host = HostStore(kv, 3)
    host.begin([(3, 2)], [], set(), 0.0)
    host.end()
    kv._data[:, :, 3] = -1
    host.begin([(1, 0), (2, 1)], [(1, 2)], {1}, 0.0)
    assert (kv._data[:, :, 1] == 3).all() and (kv.ledger[1] == 13).all()  # block 1 holds what was block 3's
    spans = host.end()
    assert [x.what for x in spans] == ["swap-out", "swap-in", "swap-out"] and [x.num_blocks for x in spans] == [1, 1, 1]
    assert (host.parts[0][0] == 1).all() and (host.parts[0][1] == 2).all() and host.ledger.tolist() == [[11, 11], [12, 12], [13, 13]]
    host.reset()
    assert not host.ledger.any()
