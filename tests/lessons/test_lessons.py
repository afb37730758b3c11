"""Each exercise solved, half solved and failed; what a check refuses; and the report that a teacher collects."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cbviz import lessons
from cbviz.core.policy import POLICIES
from cbviz.lessons import grading

# answers ----------------------------------------------------------------------------------------------------


def blocks(c: dict[str, int], with_kv: int = -1) -> dict[str, int]:
    n = c["prompt"] + c["output"] + with_kv
    held = -(-n // c["block_size"])
    return {
        "paged": held,
        "empty": held * c["block_size"] - n,
        "reserved": -(-(c["prompt"] + c["max_tokens"]) // c["block_size"]),
    }


def blocks_with_the_new_token(c: dict[str, int]) -> dict[str, int]:
    return blocks(c, 0)


def blocks_rounded_down(c: dict[str, int]) -> dict[str, int]:
    return {"paged": 0, "empty": -1, "reserved": 0}


def hits(c: dict[str, Any], last_token: int = 1, chained: bool = True) -> list[int]:
    size, seen, out = c["block_size"], set(), []
    for p in c["prompts"]:
        n = 0
        while (n + 1) * size <= len(p) - last_token and (
            tuple(p[: (n + 1) * size]) in seen if chained else tuple(p[n * size : (n + 1) * size]) in seen
        ):
            n += 1
        out.append(n * size)
        seen |= {tuple(p[:i]) if chained else tuple(p[i - size : i]) for i in range(size, len(p) + 1, size)}
    return out


def hits_without_the_last_token_rule(c: dict[str, Any]) -> list[int]:
    return hits(c, 0)


def hits_unchained(c: dict[str, Any]) -> list[int]:
    return hits(c, 1, False)


def no_hits(c: dict[str, Any]) -> list[int]:
    return [1] * len(c["prompts"])


def victim(c: dict[str, Any]) -> str:
    if c["rule"] == "last":
        return str(c["running"][-1]["request_id"])
    key = {
        "lowest-priority": lambda r: (r["priority"], r["arrived"]),
        "least-work-lost": lambda r: (-r["num_computed_tokens"], r["arrived"]),
        "fewest-outputs": lambda r: (-r["num_output_tokens"], r["num_prompt_tokens"], r["arrived"]),
    }[c["rule"]]
    return str(max(c["running"], key=key)["request_id"])


def always_the_last(c: dict[str, Any]) -> str:
    return str(c["running"][-1]["request_id"])


def nobody(c: dict[str, Any]) -> None:
    return None


def step(c: dict[str, Any]) -> dict[str, int]:
    left, out = c["budget"], {}
    for r in sorted(c["running"], key=lambda r: r["num_tokens"] - r["num_computed_tokens"] > 1):
        out[r["request_id"]] = n = min(left, r["num_tokens"] - r["num_computed_tokens"])
        left -= n
    for r in c["waiting"][: c["seats"] - len(c["running"])]:
        out[r["request_id"]] = n = min(left, r["num_tokens"])
        left -= n
    return out


def step_without_admission(c: dict[str, Any]) -> dict[str, int]:
    return {k: n for k, n in step(c).items() if k in {r["request_id"] for r in c["running"]}}


def step_of_nothing(c: dict[str, Any]) -> dict[str, int]:
    return {r["request_id"]: 1 for r in c["waiting"]}


def aged(r: Any, now: float) -> float:
    return float(r.num_remaining - r.num_waiting_steps)


def shortest(r: Any, now: float) -> int:
    return int(r.num_remaining)


def fcfs(r: Any, now: float) -> int:
    return int(r.seq)


def lookup(c: dict[str, Any], last: bool = False) -> list[int]:
    t = c["text"]
    for n in range(min(c["longest"], len(t) - 1), c["shortest"] - 1, -1):
        for i in range(len(t) - n - 1, -1, -1) if last else range(len(t) - n):
            if t[i : i + n] == t[-n:]:
                return list(t[i + n : i + n + c["most"]])
    return []


def drafts(c: dict[str, Any], own: int = 1) -> dict[str, Any]:
    d, right = lookup(c), 0
    while right < len(d) and d[right] == c["would_say"][right]:
        right += 1
    return {"drafts": d, "yields": c["would_say"][: right + own], "computed": len(d) + 1}


def drafts_without_the_models_own(c: dict[str, Any]) -> dict[str, Any]:
    return drafts(c, 0)


def drafts_from_the_latest_place(c: dict[str, Any]) -> dict[str, Any]:
    return {**drafts(c), "drafts": lookup(c, last=True)[:1]}


def no_drafts(c: dict[str, Any]) -> dict[str, Any]:
    return {"drafts": None, "yields": c["would_say"], "computed": 0}


def pool(c: dict[str, int], null_block: int = 1, itself: int = 0) -> dict[str, int]:
    block = (
        round(c["layers"] * 2 * c["kv_heads"] * (c["head_dim"] * c["bits"] / 8 + c["scale_bytes"]))
        * c["block_size"]
    )
    gone = max(0, c["computed"] - c["window"] - itself) // c["block_size"] if c["window"] else 0
    return {
        "block_bytes": block,
        "blocks": c["memory"] // block - null_block,
        "held": -(-c["computed"] // c["block_size"]) - gone,
    }


def pool_with_the_null_block(c: dict[str, int]) -> dict[str, int]:
    return pool(c, 0)


def pool_that_forgets_the_token_itself(c: dict[str, int]) -> dict[str, int]:
    return pool(c, 1, 1)


def pool_of_keys_alone(c: dict[str, int]) -> dict[str, int]:
    return {
        "block_bytes": pool(c)["block_bytes"] // 2,
        "blocks": 2 * pool(c)["blocks"],
        "held": 1 + c["computed"] // c["block_size"] + c["window"],
    }


SOLVED = {
    "count-the-blocks": blocks,
    "count-the-hits": hits,
    "name-the-victim": victim,
    "predict-the-step": step,
    "meet-the-slo": {"max_num_seqs": 32, "max_num_batched_tokens": 224},
    "beat-fcfs": aged,
    "accept-the-drafts": drafts,
    "fill-the-pool": pool,
}
HALF: dict[str, list[Any]] = {
    "count-the-blocks": [blocks_with_the_new_token],
    "count-the-hits": [hits_without_the_last_token_rule, hits_unchained],
    "name-the-victim": [always_the_last],
    "predict-the-step": [step_without_admission],
    "meet-the-slo": [{}, {"max_num_seqs": 32, "max_num_batched_tokens": 2048}],
    "beat-fcfs": [shortest],
    "accept-the-drafts": [drafts_without_the_models_own, drafts_from_the_latest_place],
    "fill-the-pool": [pool_with_the_null_block, pool_that_forgets_the_token_itself],
}
FAILED = {
    "count-the-blocks": blocks_rounded_down,
    "count-the-hits": no_hits,
    "name-the-victim": nobody,
    "predict-the-step": step_of_nothing,
    "meet-the-slo": {"max_num_seqs": 6, "max_num_batched_tokens": 1024},
    "beat-fcfs": fcfs,
    "accept-the-drafts": no_drafts,
    "fill-the-pool": pool_of_keys_alone,
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has reached anything yet."""
    monkeypatch.setattr(grading, "_SCORES", {})


def test_the_lists_are_complete() -> None:
    assert list(SOLVED) == list(HALF) == list(FAILED) == lessons.exercises()


# marks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVED)
def test_solved(name: str) -> None:
    for seed in (4000,) if name in ("meet-the-slo", "beat-fcfs") else range(4000, 4008):
        result = lessons.grade(name, SOLVED[name], seed)
        assert result.solved and result.score == 100, f"{result}"
        assert sum(p.points for p in result.parts) == 100


@pytest.mark.parametrize(("name", "answer"), [(n, a) for n, answers in HALF.items() for a in answers])
def test_half_solved(name: str, answer: Any) -> None:
    result = lessons.grade(name, answer, 4000)
    assert not result.solved
    assert 10 < result.score < 95, f"{result}"


@pytest.mark.parametrize("name", FAILED)
def test_failed(name: str) -> None:
    result = lessons.grade(name, FAILED[name], 4000)
    assert result.score <= 25, f"{result}"


def test_what_each_half_answer_lacks() -> None:
    def share(name: str, answer: Any) -> dict[str, float]:
        return {p.name: p.share for p in lessons.grade(name, answer, 4000).parts}

    got = share("count-the-blocks", blocks_with_the_new_token)
    assert got["reserved"] == 1 and got["empty"] < 0.5 and 0 < got["paged"] < 1
    got = share("count-the-hits", hits_without_the_last_token_rule)
    assert got["one token changed"] == 1 and got["a whole prompt again"] < 1
    got = share("count-the-hits", hits_unchained)
    assert got["one token changed"] < 1
    got = share("name-the-victim", always_the_last)
    assert got["last"] == 1 and got["lowest-priority"] == 0 and got["least-work-lost"] == 0
    got = share("predict-the-step", step_without_admission)
    assert got["decodes"] == 1 and got["half-done prompts"] == 1 and got["admissions"] < 0.5
    assert share("meet-the-slo", {"max_num_seqs": 32, "max_num_batched_tokens": 2048}) == {
        "first tokens": 1,
        "gaps": 0,
        "both at once": 0,
    }
    got = share("accept-the-drafts", drafts_without_the_models_own)
    assert got == {"drafts": 1, "yields": 0, "computed": 1}
    got = share("fill-the-pool", pool_with_the_null_block)
    assert got == {"block_bytes": 1, "blocks": 0, "held": 1}
    got = share("fill-the-pool", pool_that_forgets_the_token_itself)
    assert got["block_bytes"] == 1 and got["blocks"] == 1 and 0.3 < got["held"] < 1
    got = share("beat-fcfs", shortest)
    assert got["faster"] == 1 and got["nobody starves"] < 0.7


# draws ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "count-the-blocks",
        "count-the-hits",
        "name-the-victim",
        "predict-the-step",
        "accept-the-drafts",
        "fill-the-pool",
    ],
)
def test_a_remembered_answer_fails_another_draw(name: str) -> None:
    """An answer that knows every case of one draw by heart, and nothing else, passes there and nowhere else."""
    known: dict[str, Any] = {}
    right: Any = SOLVED[name]

    def learn(c: dict[str, Any]) -> Any:
        known[json.dumps(c)] = right(c)
        return known[json.dumps(c)]

    assert lessons.grade(name, learn, 4000).solved
    assert lessons.grade(name, lambda c: known.get(json.dumps(c)), 4000).solved
    assert lessons.grade(name, lambda c: known.get(json.dumps(c)), 4001).score <= 10


def test_each_check_draws_anew() -> None:
    ex = lessons.exercise("count-the-hits")
    seeds = {ex.check(hits).seed for _ in range(4)}
    assert len(seeds) == 4 and min(seeds) >= grading.FIRST_HIDDEN


def test_equal_seeds_give_equal_results() -> None:
    for name in ("count-the-blocks", "count-the-hits", "name-the-victim", "predict-the-step"):
        assert lessons.grade(name, HALF[name][0], 7777) == lessons.grade(name, HALF[name][0], 7777)


def test_a_function_cannot_change_the_case() -> None:
    def vandal(c: dict[str, Any]) -> str:
        answer = victim(c)
        c["running"].clear()
        c["rule"] = "last"
        return answer

    assert lessons.grade("name-the-victim", vandal, 4000).solved


# what goes wrong --------------------------------------------------------------------------------------------


def test_an_error_in_the_answer_is_told_and_costs_its_points() -> None:
    result = lessons.grade("name-the-victim", lambda c: c["nonsense"], 4000)
    assert result.score == 0
    assert "KeyError: 'nonsense'" in str(result)


def test_the_first_wrong_case_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = lessons.grade("name-the-victim", always_the_last, 4000)
    assert ".wrong()" in str(result)
    result.wrong()
    out = capsys.readouterr().out
    assert "the engine says: 'r" in out and "num_computed_tokens" in out
    lessons.grade("name-the-victim", victim, 4000).wrong()
    assert capsys.readouterr().out == "No case went wrong.\n"


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("count-the-blocks", {"paged": 3}, "the answer is a function of one case, not dict"),
        ("name-the-victim", "r3", "the answer is a function of one case, not str"),
        ("beat-fcfs", "sjf", r"the answer is a function of \(r, now\), not str"),
        ("meet-the-slo", "more seats", "the answer is a dict of settings"),
        (
            "meet-the-slo",
            {"modelled_device": "NVIDIA B200 SXM"},
            "'modelled_device' is not yours to set here",
        ),
        ("meet-the-slo", {"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_the_wrong_kind_of_answer(name: str, answer: Any, message: str) -> None:
    with pytest.raises(lessons.LessonError, match=message):
        lessons.exercise(name).check(answer)
    assert grading._SCORES == {}


def test_an_unknown_exercise() -> None:
    with pytest.raises(lessons.LessonError, match="did you mean 'name-the-victim'"):
        lessons.exercise("name-a-victim")
    with pytest.raises(lessons.LessonError, match="there are: count-the-blocks, "):
        lessons.exercise("xyzzy")


def test_a_policy_leaves_the_table_of_policies_as_it_was() -> None:
    before = dict(POLICIES)
    result = lessons.grade("beat-fcfs", fcfs, 4000)  # called like the built-in one, and as slow
    assert before == POLICIES
    assert result.parts[0].note.startswith("mean time is 100%")
    bad = lessons.grade("beat-fcfs", lambda r, now: None, 4000)
    assert bad.score == 0 and "None" in bad.parts[0].note
    assert before == POLICIES


def test_a_policy_that_asks_chance_is_refused() -> None:
    rng = random.Random(1)
    result = lessons.grade("beat-fcfs", lambda r, now: rng.random(), 4000)
    assert result.score == 0
    assert "another rank when asked again" in result.parts[0].note


# a student's way through ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVED)
def test_it_can_be_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ex = lessons.exercise(name)
    assert ex.name == name
    ex.show()
    out = capsys.readouterr().out
    assert out.startswith(ex.title) and ("A case:" in out or "modelled" in out)
    ex.show(3)
    assert capsys.readouterr().out != out
    for i in (1, 2, 3):
        ex.hint()
        assert capsys.readouterr().out.startswith(f"Hint {i} of 3: ")
    ex.hint()
    assert capsys.readouterr().out == "That was the last hint.\n"
    with pytest.raises(lessons.LessonError, match=r"0\.\.999"):
        ex.show(5000)


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ex = lessons.exercise("name-the-victim")
    ex.hint()
    ex.check(always_the_last)
    assert "best so far" in repr(ex)
    path = lessons.report("Ada L.")
    assert path.name == "cbviz-lessons-ada-l.json"
    first = json.loads(path.read_text(encoding="utf-8"))
    assert first["name"] == "Ada L." and first["of"] == 800 and first["solved"] == []
    row = first["exercises"]["name-the-victim"]
    assert (row["attempts"], row["hints"], len(row["seeds"])) == (1, 1, 1)
    assert "def always_the_last" in row["answer"]
    # a teacher grades it again
    assert lessons.grade("name-the-victim", always_the_last, row["seed"]).score == row["score"]

    ex.check(victim)
    ex.check(nobody)  # a later, worse attempt takes nothing away
    lessons.exercise("count-the-hits").check(hits)
    second = json.loads(lessons.report("Ada L.").read_text(encoding="utf-8"))
    row = second["exercises"]["name-the-victim"]
    assert (row["score"], row["attempts"], row["hints"], len(row["seeds"])) == (100, 3, 1, 3)
    assert second["solved"] == ["count-the-hits", "name-the-victim"] and second["total"] == 200


def test_reports_of_two_notebooks_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    lessons.exercise("name-the-victim").check(victim)
    lessons.report("Ada", path)
    monkeypatch.setattr(grading, "_SCORES", {})  # another notebook is another process
    lessons.exercise("count-the-blocks").check(blocks)
    lessons.exercise("name-the-victim").check(nobody)
    lessons.report("Ada", path)
    once = json.loads(path.read_text(encoding="utf-8"))
    assert once["total"] == 200 and once["exercises"]["name-the-victim"]["attempts"] == 2
    again = json.loads(lessons.report("Ada", path).read_text(encoding="utf-8"))
    assert again["exercises"] == once["exercises"]  # reporting twice counts nothing twice


def test_a_report_is_not_written_over_something_else(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    lessons.report("Ada", path)
    with pytest.raises(lessons.LessonError, match="the report of 'Ada'"):
        lessons.report("Grace", path)
    path.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(lessons.LessonError, match="no report"):
        lessons.report("Ada", path)
    assert path.read_text(encoding="utf-8") == "[1, 2]"
    with pytest.raises(lessons.LessonError, match="name is empty"):
        lessons.report("  ")


# the runner -------------------------------------------------------------------------------------------------


def test_without_torch_the_simulator_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert lessons.runner() == "sim"
    assert "made up" in capsys.readouterr().out


def test_without_the_model_the_simulator_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(model: str) -> None:
        raise lessons.hub.ModelError("no network")

    monkeypatch.setattr(lessons.hub, "resolve", gone)
    assert lessons.runner() == "sim"
    assert "no network" in capsys.readouterr().out
