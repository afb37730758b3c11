"""`cbviz compare`: recorded runs, runs in turn, and the ratio that a fit predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbviz import Session, Trace
from cbviz.interleave import Fit, fit, rows, run_interleaved, run_rounds, total_s
from cbviz.messages import StepRecord, TokenAccount
from tests.cli.conftest import Call

TWO = (
    "compare",
    "--runner",
    "sim",
    "--workload",
    "article",
    "--discipline",
    "static",
    "--discipline",
    "chunked",
    "--set",
    "max_num_seqs=4",
)


def test_in_turn(cbviz: Call, cache: Path) -> None:
    r = cbviz(*TWO, "--json")
    assert r.code == 0
    d = r.json
    assert [(n, x["steps"]) for n, x in d["runs"].items()] == [("static", 815), ("chunked", 581)]
    assert d["base"] == "static"
    assert d["tokens_equal"] is True
    assert d["equal"] is False
    assert d["timing"] is None  # nothing was measured
    assert d["runs"]["static"]["tokens"] == d["runs"]["chunked"]["tokens"]
    c = d["comparisons"]["chunked"]
    assert c["first_difference"]["step"] == 1
    assert c["metrics"]["num_steps"] == {"ours": 815, "theirs": 581, "ratio": 581 / 815}
    aligned = {x["request_id"]: x for x in c["requests"]}
    assert aligned["r20"]["finish_step"] == [723, 564]
    assert "r1" not in aligned  # nothing of its schedule differs

    words = cbviz(*TWO).out
    assert "outputs are equal: the same tokens for all 20 requests" in words
    assert "times are modelled" in words
    assert "618 > 459" in words


def test_every_discipline_with_every_policy(cbviz: Call, cache: Path) -> None:
    d = cbviz(*TWO, "--policy", "fcfs", "--policy", "sjf", "--json").json
    assert list(d["runs"]) == ["static/fcfs", "static/sjf", "chunked/fcfs", "chunked/sjf"]
    assert d["runs"]["chunked/sjf"]["config"]["policy"] == "sjf"


def test_recorded_runs(cbviz: Call, cache: Path, tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{n}.jsonl" for n in "abc")
    for path, more in ((a, ()), (b, ("--discipline", "vllm")), (c, ("--seed", "1"))):
        cbviz("run", "--runner", "sim", "--out", path, *more)
    same = cbviz("compare", a, a, "--json").json
    assert same["equal"] is True
    assert len(same["runs"]) == 2
    r = cbviz("compare", a, b, c)
    assert r.code == 0
    assert "c against a: schedules are equal, blocks are equal" in r.out
    assert "first differing token: r1, output 0: token " in r.out
    assert "(20 outputs differ, 0 of them first at a tie)" in r.out
    assert cbviz("compare", a, b, "--json").json["tokens_equal"] is True


def test_steps_are_taken_in_turn() -> None:
    """At no time is one run ahead of another by more than one step's useful tokens."""
    sessions = [
        Session("article", runner="sim", discipline=d, max_num_seqs=4) for d in ("static", "chunked", "paged")
    ]
    useful, most, order = [0, 0, 0], 0, []

    def tell(i: int, record: StepRecord) -> None:
        nonlocal most
        order.append(i)
        useful[i] += record.tokens.useful
        most = max(most, record.tokens.useful)
        if not sessions[i].done:
            assert max(useful) - min(useful) <= most

    run_interleaved(sessions, tell)
    assert order[:3] == [0, 1, 2]
    assert all(s.done for s in sessions)
    assert len(set(useful)) == 1
    alone = Session("article", runner="sim", discipline="chunked", max_num_seqs=4)
    alone.run()
    assert alone.digest() == sessions[1].digest()


def test_rounds_start_again() -> None:
    sessions = [Session("chat", runner="sim", discipline=d) for d in ("static", "chunked")]
    played = run_rounds(sessions, 3)
    assert len(played) == 3
    for i in range(2):
        assert len({len(r[i]) for r in played}) == 1
        assert played[0][i] is not played[1][i]
    assert len(run_rounds([Session("chat", runner="sim")])) == 1  # a modelled second is always the same


def measured(times: list[tuple[int, float]]) -> Trace:
    """A trace of steps of so many tokens and seconds."""
    t, now = Trace(), 0.0
    for n, (tokens, s) in enumerate(times, 1):
        t.append(
            StepRecord(
                n,
                now,
                now + s,
                "measured",
                [],
                [],
                tokens=TokenAccount(total=tokens, useful=tokens),
                measured_s=s,
            )
        )
        now += s
    return t


def test_the_fit_finds_what_it_was_made_from() -> None:
    a, b = ([(n, 0.02 + 0.003 * n) for n in sizes] for sizes in ([4, 4, 1, 100, 2], [4, 3, 64, 4, 4, 4, 1]))
    found = fit([a, b])
    assert found is not None
    assert found.cost_per_step_s == pytest.approx(0.02)
    assert found.cost_per_token_s == pytest.approx(0.003)
    assert found.r2 == pytest.approx(1.0)
    assert found.num_steps == 12
    assert found.predict(a) == pytest.approx(total_s(a))


def test_the_prediction_can_fail() -> None:
    """A run that is slower than its steps and tokens explain is told apart: the fit does not know which run a
    step is of.
    """
    a, b = [(4, 0.02)] * 50, [(4, 0.04)] * 50
    found = fit([a, b])
    assert found is not None
    assert found.predict(b) / found.predict(a) == pytest.approx(1.0)
    assert total_s(b) / total_s(a) == pytest.approx(2.0)


def test_a_fit_needs_steps() -> None:
    assert fit([[(1, 0.1)], [(2, 0.1)]]) is None
    assert fit([]) is None
    assert Fit(1.0, 0.5, 3, None).predict([(2, 9.0), (4, 9.0)]) == 5.0


def test_each_step_counts_with_its_best_round() -> None:
    quiet, noisy = measured([(4, 0.02), (4, 0.5), (1, 0.01)]), measured([(4, 0.03), (4, 0.02), (1, 0.02)])
    assert rows([quiet, noisy]) == [(4, 0.02), (4, 0.02), (1, 0.01)]
    other = measured([(3, 0.001), (5, 0.001), (1, 0.001)])
    assert rows([quiet, other]) == [(4, 0.02), (4, 0.5), (1, 0.01)]  # other steps can't be laid over these
    modelled = Session("chat", runner="sim")
    modelled.run()
    assert rows([modelled.trace]) == []


@pytest.mark.model
def test_the_real_model_is_measured_and_predicted(cbviz: Call, tmp_path: Path) -> None:
    requests = tmp_path / "some.jsonl"
    requests.write_text(
        "".join(
            f'{{"prompt_len": {5 + i}, "output_len": {3 + 4 * (i % 2)}, "arrival_step": 0}}\n'
            for i in range(4)
        )
    )
    args = (
        "compare",
        "--workload",
        requests,
        "--discipline",
        "static",
        "--discipline",
        "chunked",
        "--set",
        "max_num_seqs=2",
        "--set",
        "num_blocks=32",
        "--set",
        "precision=exact",
    )
    d = cbviz(*args, "--rounds", "2", "--json").json
    assert d["rounds"] == 2
    assert d["tokens_equal_up_to_ties"] is True
    t = d["timing"]
    for name, run in t["runs"].items():
        assert run["steps"] == d["runs"][name]["steps"]
        assert run["tokens"] == d["runs"][name]["metrics"]["token_accounts"]["total"]
    ratio = t["ratios"]["chunked"]
    assert ratio["measured"] == pytest.approx(
        t["runs"]["chunked"]["measured_s"] / t["runs"]["static"]["measured_s"]
    )
    a, b = ((x["steps"], x["tokens"]) for x in t["runs"].values())
    cost = (t["fit"]["cost_per_step_s"], t["fit"]["cost_per_token_s"])
    assert ratio["predicted"] == pytest.approx(
        (cost[0] * b[0] + cost[1] * b[1]) / (cost[0] * a[0] + cost[1] * a[1])
    )
    assert len(ratio["rounds"]) == 2
    out = cbviz(*args, "--rounds", "1").out
    assert "measured:  chunked takes " in out
    assert "predicted: " in out
    assert "times are measured" in out
