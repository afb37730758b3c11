"""Behaviour is what it was when the goldens were stored: schedules, wire messages, figures, real tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.goldens import stored
from tests.strategies import DISCIPLINES, VICTIMS

GROUPS = [*stored.WITHOUT_MODEL, pytest.param("tokens", marks=pytest.mark.model)]
BUILT_IN = [
    "fcfs",
    "priority",
    "ageing",
    "sjf",
    "srpt",
    "sjf-predicted",
    "sjf-wrong",
    "deadline",
    "lpm",
    "dfs-weight",
    "fair",
    "experts",
]
"""By name: another test may have registered a policy of its own."""
HELP = "If the change is meant, store it: python -m tests.goldens.make"


def computed_elsewhere(group: str, file: Path) -> dict[str, stored.Case]:
    """The group's cases as a fresh process computes them: no other test can have registered a policy there."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"}
    subprocess.run(
        [sys.executable, "-m", "tests.goldens.make", group, "--to", str(file)],
        cwd=ROOT,
        env=env,
        check=True,
        timeout=280,
    )
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_changed_since_the_goldens_were_stored(group: str, tmp_path: Path) -> None:
    now = computed_elsewhere(group, tmp_path / "now.json")

    before = {n: c for n, c in stored.load().items() if n.split("-", 1)[0] == group}
    changed = stored.differences(before, now)

    assert len(now) == len(before) > 0
    assert not changed, "\n".join([f"{len(changed)} of {len(now)} cases changed. {HELP}", *changed[:20]])


def test_the_stored_schedules_cover_every_rule() -> None:
    """Each discipline, policy, victim rule and technique is drawn in at least five runs."""
    words = Counter(
        w for n, c in stored.load().items() if n.startswith("schedule-") for w in c["about"].split()
    )
    wanted = [f"discipline={d}" for d in DISCIPLINES] + [f"victim={v}" for v in VICTIMS]
    wanted += [f"policy={p}" for p in BUILT_IN]
    wanted += ["window", "sinks", "swap", "contiguous", "caching", "beams", "n", "abort", "add", "configure"]
    wanted += ["speculative=ngram", "speculative=self-draft", "speculative=draft-model"]
    wanted += ["then=rewind", "then=fork", "then=resize", "then=fork-at-0", "then=reset"]
    assert [w for w in wanted if words[w] < 5] == []


def test_a_changed_hash_names_its_case_and_part() -> None:
    a = {"schedule-001": {"about": "x", "schedule": "1", "times": "2"}}
    b = {"schedule-001": {"about": "x", "schedule": "1", "times": "3"}}

    assert stored.differences(a, a) == []
    assert stored.differences(a, b) == ["schedule-001: times (x); python -m tests.goldens.diff schedule-001"]
    assert len(stored.differences(a, {})) == 1


def test_the_stored_wire_messages_are_small() -> None:
    assert 1_000 < stored.WIRE_FILE.stat().st_size < 200_000
    assert "short first" in stored.stored_wire_text()
