"""vLLM's own scheduler, recorded: ours does the same in every step, block ids included.

And a control: one that does not is found, with the place.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cbviz.conform import (
    ENGINE_KEYS,
    LISTS,
    SPEC_KEYS,
    STEP_KEYS,
    conform,
    conform_scenario,
    find,
    read,
    same,
)
from cbviz.core import admission
from cbviz.core.policies import Fcfs
from cbviz.core.policy import POLICIES
from cbviz.core.request import Request, RequestView
from cbviz.core.state import ControlState

NUM_SCENARIOS = 85


def test_all_recordings_are_equal(conformance: Path) -> None:
    seen: list[tuple[int, int]] = []
    out = conform([conformance / "vllm-0.32"], progress=lambda i, n, name: seen.append((i, n)))
    assert [(o.name, o.step, o.key, o.ours, o.theirs) for o in out if not o.equal] == []
    assert len(out) == NUM_SCENARIOS and not any(o.skipped for o in out)
    assert len({o.name for o in out}) == NUM_SCENARIOS
    assert sum(o.steps for o in out) > 5000
    assert seen == [(i, NUM_SCENARIOS) for i in range(NUM_SCENARIOS)]


def test_all_recordings_with_speculation_are_equal(conformance: Path) -> None:
    out = conform([conformance / "vllm-0.32-spec"])
    assert [(o.name, o.step, o.key, o.ours, o.theirs) for o in out if not o.equal] == []
    assert len(out) == 15 and not any(o.skipped for o in out)


def test_without_the_padding_rule_it_is_found(conformance: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a scheduler that makes no newcomer as long as the decodes differs where the facts page
    says vLLM does.
    """
    monkeypatch.setattr(admission, "_pads_drafts", lambda a, threshold: False)
    different = {o.name for o in conform([conformance / "vllm-0.32-spec"]) if not o.equal}
    assert different == {"s2007", "s2008", "s2009", "s2011", "s2012", "s2014"}


class LastComeFirstServed(Fcfs):
    def rank(self, r: RequestView, now: float) -> int:
        return -r.seq


def test_another_policy_is_found_with_step_and_key(
    conformance: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: under a policy that turns the queue round, the first difference is where the queue first
    shows it.
    """
    d = next(
        d
        for d in map(read, find([conformance / "vllm-0.32"]))
        if d["config"]["policy"] == "fcfs" and any(len(s["waiting"]) > 2 for s in d["steps"])
    )
    assert conform_scenario("x", d).equal
    first = next(s["step"] for s in d["steps"] if len(s["waiting"]) > 1 or len(s["added"]) > 1)
    monkeypatch.setitem(POLICIES, "fcfs", LastComeFirstServed())
    out = conform_scenario("x", d)
    assert not out.equal
    assert out.step == first
    assert out.key in ("scheduled", "waiting", "new")
    assert out.ours != out.theirs


def test_another_block_order_is_found(conformance: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for block ids: blocks freed in the other order are the same number of blocks, and still a
    difference.
    """
    from cbviz.core.kv.block_pool import BlockPool

    free = BlockPool.free
    monkeypatch.setattr(BlockPool, "free", lambda self, ids, owner: free(self, list(ids)[::-1], owner))
    out = conform([conformance / "vllm-0.32"])
    different = [o for o in out if not o.equal]
    assert len(different) > NUM_SCENARIOS // 2
    assert {o.key for o in different} & {"blocks"}


def test_a_changed_recording_is_found(conformance: Path) -> None:
    d = read(find([conformance / "vllm-0.32"])[0])
    changed = copy.deepcopy(d)
    changed["steps"][7]["free_blocks_after"] += 1
    out = conform_scenario("x", changed)
    assert (out.equal, out.step, out.key) == (False, 7, "free_blocks_after")
    short = copy.deepcopy(d)
    short["steps"] = short["steps"][:-1]
    assert conform_scenario("x", short).key == "steps"
    long = copy.deepcopy(d)
    long["steps"].append(long["steps"][-1])
    out = conform_scenario("x", long)
    assert (out.equal, out.key, out.step) == (False, "steps", len(d["steps"]))


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no recording at .*nowhere"):
        find([tmp_path / "nowhere"])


def test_the_checker_would_notice(conformance: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariants are checked after every step of a replay: a leak is an error there, not a difference."""
    end = ControlState.end

    def leak(self: ControlState, r: Request, reason: str) -> None:
        end(self, r, reason)
        self.pool.ref_count[1] += 1

    monkeypatch.setattr(ControlState, "end", leak)
    with pytest.raises(AssertionError, match="reference counts differ"):
        conform_scenario("x", read(find([conformance / "vllm-0.32"])[0]))


# order: compared only where vLLM has one --------------------------------------------------------------------


def turned_round(d: dict[str, Any], key: str) -> tuple[dict[str, Any], int]:
    """The recording with the first list of `key` that has two different members turned round, and its step;
    step -1: there is none.
    """
    changed = copy.deepcopy(d)
    for row in changed["steps"]:
        if len(row[key]) > 1 and row[key] != row[key][::-1]:
            row[key].reverse()
            return changed, row["step"]
    return changed, -1


@pytest.mark.parametrize("key", [k for k in STEP_KEYS if k in LISTS])
def test_order_counts_where_the_original_orders(key: str, conformance: Path) -> None:
    """Given a recording with one list turned round, when it is replayed, then that is a difference only if
    vLLM orders the list.
    """
    ordered = LISTS[key][0]
    for path in find([conformance / "vllm-0.32"]):
        changed, step = turned_round(read(path), key)
        if step >= 0:
            out = conform_scenario("x", changed)
            assert (out.equal, out.step, out.key) == ((False, step, key) if ordered else (True, None, None))
            return
    pytest.skip(f"no recording has two members in {key!r} of one step")


def test_every_list_of_the_recordings_says_whether_it_is_ordered(conformance: Path) -> None:
    """A new key of lists must be looked up in vLLM before it is compared."""
    assert LISTS.keys() <= {*STEP_KEYS, *ENGINE_KEYS}
    for path in find(
        [conformance / "vllm-0.32", conformance / "vllm-0.32-spec", conformance / "vllm-0.32-inproc"]
    ):
        d = read(path)
        steps = d["steps"] if isinstance(d, dict) else [row for row in d if row["kind"] == "step"]
        keys = {*STEP_KEYS, *ENGINE_KEYS, *SPEC_KEYS}
        assert {
            k for row in steps for k, v in row.items() if isinstance(v, list) and k in keys
        } <= LISTS.keys(), path.name


def test_a_set_in_another_order_is_the_same_set() -> None:
    for key, (ordered, _) in LISTS.items():
        assert same(key, ["r1", "r2"], ["r2", "r1"]) is not ordered
        assert not same(key, ["r1", "r1", "r2"], ["r1", "r2", "r2"])
        assert not same(key, ["r1"], ["r1", "r2"])


@pytest.mark.model
def test_a_whole_engines_finished_requests_are_a_set(conformance: Path, tmp_path: Path) -> None:
    """Two requests end in one step of this recording. vLLM tells of them in any order; the waiting queue has
    but one.
    """
    name, told = "prio_b64_prefix", "finished_told"
    lines = read(conformance / "vllm-0.32-inproc" / f"{name}.jsonl.gz")
    shutil.copy(conformance / "vllm-0.32-inproc" / "workload.json", tmp_path)
    row = next(x for x in lines if x["kind"] == "step" and len(x[told]) > 1)
    row[told].reverse()
    recording = tmp_path / f"{name}.jsonl"
    recording.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert [(o.name, o.equal) for o in conform([recording])] == [(name, True)]

    row = next(x for x in lines if x["kind"] == "step" and len(x["waiting"]) > 1)
    row["waiting"].reverse()
    recording.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert [(o.step, o.key) for o in conform([recording])] == [(row["step"], "waiting")]
