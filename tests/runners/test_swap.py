"""Swapping on the real engine: the tokens of a run that recomputes, nothing computed twice, measured copies
beside the pass, and what a failure leaves.
"""

from __future__ import annotations

from time import sleep
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
    config = {
        "num_blocks": 26,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 6,
        "precision": "exact",
        "clock": "measured",
        "discipline": "vllm",
        **fields,
    }
    return Session(SPECS, runner=TorchRunner(MODEL, EngineConfig(**config)), **config)


def outputs(s: Session) -> dict[str, list[int]]:
    return {i: s.request(i).output_token_ids for i in s.request_ids}


@pytest.mark.parametrize("caching", [False, True])
def test_tokens_are_those_of_recomputing(caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, s = (
        session(enable_prefix_caching=caching),
        session(enable_prefix_caching=caching, preemption_mode="swap"),
    )
    monkeypatch.setattr(
        s.runner,
        "_recompute",
        lambda *a: pytest.fail("a swap brought something else back, so it was computed again"),
    )
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
        assert sum(x.num_blocks for x in r.spans if x.what == "swap-out") == sum(
            len(e.block_ids) for e in r.events if isinstance(e, ev.SwappedOut)
        )


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


class LateHost(HostStore):
    """Copies to the host that nobody waits for begin when the step's work is done: the latest that they may."""

    def begin(self, *args: Any) -> None:
        self.starts = 0
        super().begin(*args)

    def _start(self, what: str, pairs: Any) -> Any:
        self.starts += 1
        if self.starts == 3:
            self.late = pairs
            return None
        return super()._start(what, pairs)

    def end(self) -> Any:
        if self.starts:
            super()._start("swap-out", self.late)
        self.starts = 0
        return super().end()

    starts = 0
    late: Any = ()


@pytest.mark.parametrize(
    "more",
    [{}, {"speculative": "self-draft", "num_speculative_tokens": 2, "num_blocks": 22}],
    ids=["plain", "drafts of a model"],
)
def test_a_copy_to_the_host_may_be_late(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written in a step, also by a model that drafts behind the tokens, was copied before."""
    monkeypatch.setattr("cbviz.runners.torch_runner.HostStore", LateHost)
    kept: dict[int, Any] = {}
    begin, copy = LateHost.begin, LateHost._copy

    def note(self: LateHost, out: Any, back: Any, overwritten: Any, t0: float) -> None:
        kept.update({h: [p.select(2, d).clone() for p in self.kv.parts] for d, h in out})
        begin(self, out, back, overwritten, t0)

    def compare(self: LateHost, what: str, pairs: Any) -> Any:
        done = copy(self, what, pairs)
        if what == "swap-out":
            assert all(
                torch.equal(mine, host[h])
                for _, h in pairs
                for mine, host in zip(kept[h], self.parts, strict=True)
            ), "overwritten before it was copied"
        return done

    monkeypatch.setattr(LateHost, "begin", note)
    monkeypatch.setattr(LateHost, "_copy", compare)
    s = session(preemption_mode="swap", **more)
    s.run()
    assert sum(isinstance(e, ev.SwappedOut) for r in s.trace for e in r.events) > 1


def test_a_copy_that_fails_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KVStore(1, 4, 1, 2, 3)
    kv.ledger[:] = 7
    host = HostStore(kv, 3)

    def breaks(what: str, pairs: Any) -> tuple[float, float]:
        raise OSError("no memory")

    with monkeypatch.context() as m:
        m.setattr(host, "_copy", breaks)
        with pytest.raises(OSError):
            host.begin([(1, 0), (2, 1)], [], {1}, 0.0)
        with pytest.raises(OSError):
            host.end()
    assert not host.ledger.any()
    host.begin([(1, 0)], [], set(), 0.0)
    assert (
        [x.what for x in host.end()] == ["swap-out"]
        and host.ledger[0].tolist() == [7, 7]
        and not host.ledger[1:].any()
    )


def test_no_copy_goes_on_behind_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's other copies were begun; a block that the next step writes must not be filled from the host
    after that.
    """
    kv = KVStore(1, 4, 1, 2, 3)
    host = HostStore(kv, 3)
    done: list[str] = []

    def copy(what: str, pairs: Any) -> tuple[float, float]:
        if what == "swap-out":
            raise OSError("no memory")
        sleep(0.1)
        done.append(what)
        return 0.0, 0.0

    monkeypatch.setattr(host, "_copy", copy)
    with pytest.raises(OSError):
        host.begin([(1, 0)], [(2, 1)], {1}, 0.0)
    with pytest.raises(OSError):
        host.end()
    assert done == ["swap-in"] and not kv.ledger.any() and not host.ledger.any()


def test_the_order_of_a_steps_copies() -> None:
    """One step sends block 1 out, fills it from the host and sends block 2 out: what arrives is what was
    there before.
    """
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
    assert [x.what for x in spans] == ["swap-out", "swap-in", "swap-out"] and [
        x.num_blocks for x in spans
    ] == [1, 1, 1]
    assert (
        (host.parts[0][0] == 1).all()
        and (host.parts[0][1] == 2).all()
        and host.ledger.tolist() == [[11, 11], [12, 12], [13, 13]]
    )
    host.reset()
    assert not host.ledger.any()
