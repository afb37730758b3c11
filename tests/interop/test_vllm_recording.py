"""Recordings of a real vLLM as traces: every row comes out again, and our own run of the same requests is the
same run.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cbviz import events as ev
from cbviz.interop.perfetto import to_perfetto
from cbviz.interop.vllm_metrics import vllm_metrics
from cbviz.interop.vllm_recording import import_recording
from cbviz.session import Session
from cbviz.trace import compare, explain, load, metrics
from cbviz.trace.accounting import check_trace, executed_at
from cbviz.trace.schema import TraceError
from cbviz.trace.trace import Cursor
from cbviz.trace.why import why_missed

NAMES = (
    "alone",
    "fcfs_b256_prefix",
    "fcfs_b64_noprefix",
    "fcfs_b64_prefix",
    "ngram3_b64_prefix",
    "prio_b64_prefix",
)


@pytest.fixture(scope="module")
def folder(conformance: Path) -> Path:
    return conformance / "vllm-0.32-inproc"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.open(path)]


def test_the_folder_holds_no_recording_that_is_not_tried(folder: Path) -> None:
    assert sorted(p.name.removesuffix(".jsonl.gz") for p in folder.glob("*.jsonl.gz")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_says_what_the_rows_say(folder: Path, name: str) -> None:
    path = folder / f"{name}.jsonl.gz"
    trace = import_recording(path)
    lines = rows(path)
    steps = [x for x in lines if x["kind"] == "step"]
    assert len(trace) == len(steps)
    check_trace(trace)
    seen: set[str] = set()
    for record, row in zip(trace, steps):
        inside = trace.state(Cursor(record.step, executed_at(record)))
        assert inside.running == row["running"] and inside.waiting == row["waiting"]
        assert {rid: inside.requests[rid].block_ids for rid in inside.running} == row["blocks"]
        assert inside.num_free_blocks == row["free_blocks"]
        after = trace.state(record.step)
        assert after.num_free_blocks == row["free_blocks_after"]
        assert {rid: after.requests[rid].num_computed_tokens for rid in row["computed_after"]} == row[
            "computed_after"
        ]
        assert [[c.request_id, c.num_tokens, c.start] for c in record.chunks] == row["scheduled"]
        assert sorted(e.request_id for e in record.events if isinstance(e, ev.Preempted)) == sorted(
            row["preempted"]
        )
        assert {e.request_id: e.token_ids for e in record.events if isinstance(e, ev.Sampled)} == row[
            "appended"
        ]
        assert [e.request_id for e in record.events if isinstance(e, ev.Admitted) and not e.resumed] == row[
            "new"
        ]
        assert record.t0_s == row["t"] and record.clock == "measured"
        seen |= {type(e).__name__ for e in record.events}
    end = trace.state()
    assert {r.request_id: r.output_token_ids for r in end.by_index} == lines[-1]["tokens"]
    assert {r.request_id: r.finish_reason for r in end.by_index} == lines[-1]["finish"]
    assert {"Arrived", "Admitted", "Allocated", "Scheduled", "Sampled", "Finished", "Freed"} <= seen
    if name.endswith("_prefix"):
        assert {
            "Shared",
            "PrefixHit",
            "PrefixMiss",
            "BlockCached",
            "Evicted",
            "Preempted",
            "NotAdmitted",
        } <= seen


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("ngram")])
def test_our_own_run_of_the_same_requests_is_the_same(folder: Path, name: str) -> None:
    theirs = import_recording(folder / f"{name}.jsonl.gz")
    ours = Session.from_tape(theirs)
    assert ours.config.discipline == "vllm"
    ours.run()
    c = compare(theirs, ours.trace, ("vllm", "ours"))
    assert c.first_difference is None and c.token_differences == []
    assert c.equal and c.schedules_equal and c.blocks_equal and c.tokens_equal
    # Reasons are not part of `equal`; those rebuilt from the rows are still the ones that our scheduler gave.
    for x, y in zip(theirs, ours.trace):
        for kind in (ev.NotAdmitted, ev.PrefixHit, ev.PrefixMiss, ev.Skipped):
            assert [e for e in x.events if isinstance(e, kind)] == [
                e for e in y.events if isinstance(e, kind)
            ], f"step {x.step}"
        assert [
            (e.request_id, e.for_id, e.num_tokens_lost, e.need, e.have)
            for e in x.events
            if isinstance(e, ev.Preempted)
        ] == [
            (e.request_id, e.for_id, e.num_tokens_lost, e.need, e.have)
            for e in y.events
            if isinstance(e, ev.Preempted)
        ]


def test_another_schedule_on_the_recorded_tokens_differs_but_says_the_same(folder: Path) -> None:
    theirs = import_recording(folder / "fcfs_b64_prefix.jsonl.gz")
    other = Session.from_tape(theirs, max_num_seqs=2)
    other.run()
    c = compare(theirs, other.trace)
    assert not c.schedules_equal and c.tokens_equal and not c.equal


def test_drafts(folder: Path) -> None:
    path = folder / "ngram3_b64_prefix.jsonl.gz"
    trace = import_recording(path)
    steps = [x for x in rows(path) if x["kind"] == "step"]
    drafted = sum(len(d) for x in steps for d in x["drafts"].values())
    accepted = sum(n for x in steps for n in x["accepted"].values())
    assert drafted > accepted > 0
    # a draft that is right but comes after the end is accepted for vLLM; here it is rejected, and counted
    # apart
    past_end = sum(max(0, n - len(x["appended"][rid]) + 1) for x in steps for rid, n in x["accepted"].items())
    assert past_end > 0
    assert sum(r.tokens.rejected for r in trace) == drafted - accepted + past_end
    counts = vllm_metrics(trace).values
    assert counts["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert counts["vllm:spec_decode_num_draft_tokens_total"] == drafted
    assert sum(c.num_draft for r in trace for c in r.chunks) == drafted
    assert any("speculative decoding (ngram, up to 3 drafts)" in n for n in trace.header.notes)
    # Our engine does not draft: another schedule, the same tokens, and no figure that sets measured beside
    # modelled seconds.
    ours = Session.from_tape(trace)
    ours.run()
    c = compare(trace, ours.trace, ("vllm", "ours"))
    assert c.tokens_equal and not c.schedules_equal and c.parting is not None
    assert c.causes[0].startswith(
        "Requests waited 783 steps for their first seat under vllm, 1125 under ours: "
    )


def test_a_miss_names_the_end_of_the_shared_prompt(folder: Path) -> None:
    """All requests share one system prompt of 92 tokens: there, in block 2, the prefix of r1 parts from that
    of r0.
    """
    f = why_missed(import_recording(folder / "fcfs_b64_prefix.jsonl.gz"), 2, "r1").facts
    assert (f["other"], f["position"], f["block_index"], f["tokens_found"]) == ("r0", 92, 2, 64)


def test_the_header_says_whose_times_and_what_is_missing(folder: Path) -> None:
    trace = import_recording(folder / "fcfs_b64_prefix.jsonl.gz")
    h = trace.header
    assert (h.producer, h.clock, h.model, h.block_size, h.num_blocks) == (
        "vllm 0.32.0",
        "measured",
        "SmolLM2-135M",
        32,
        17,
    )
    assert set(h.missing) == {"cost", "texts", "gaps"} and not set(h.missing) & set(h.capabilities)
    assert (
        "measured" in h.notes[0] and metrics(trace)["clock"] == "measured" and metrics(trace)["mfu"] is None
    )
    assert any("waits" in s for record in trace for s in explain(trace, record.step))
    json.dumps(to_perfetto(trace), allow_nan=False)


def test_probabilities_where_they_were_recorded(folder: Path) -> None:
    trace = import_recording(folder / "alone.jsonl.gz")
    assert trace.has("gaps") and "gaps" not in trace.header.missing
    gaps = [g for r in trace for ids in (r.gaps or {}).values() for g in ids]
    assert len(gaps) == 999 and min(gaps) == pytest.approx(0.0010, abs=1e-9)


class Words:
    """Stands for a tokenizer: a token's text is its id."""

    def detokenizer(self, *, skip_special_tokens: bool = False) -> Words:
        return Words()

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return "."


def test_texts_through_a_tokenizer(folder: Path) -> None:
    trace = import_recording(folder / "fcfs_b64_prefix.jsonl.gz", tokenizer=Words())
    assert trace.has("texts") and "texts" not in trace.header.missing
    for r in trace.state().by_index:
        assert "".join(r.output_texts) == "".join(f"{t} " for t in r.output_token_ids) + "."


def test_saved_and_opened_again(folder: Path, tmp_path: Path) -> None:
    trace = import_recording(folder / "prio_b64_prefix.jsonl.gz")
    again = load(trace.save(tmp_path / "run.jsonl.gz"))
    assert compare(trace, again).equal and again.header == trace.header


def broken(folder: Path, tmp_path: Path, change: Any) -> Path:
    lines = rows(folder / "fcfs_b64_prefix.jsonl.gz")
    change(lines)
    shutil.copy(folder / "workload.json", tmp_path / "workload.json")
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda x: x[40]["blocks"][x[40]["running"][0]].__setitem__(0, 16), r"line 41 \(step 40\)"),
        (lambda x: x[40].update(free_blocks=9), r"line 41 \(step 40\): free_blocks is 9 in the row"),
        (lambda x: x[40].pop("waiting"), r"line 41 \(step 40\): the row lacks waiting"),
        (lambda x: x[1].update(waiting=[*x[1]["waiting"][1:], x[1]["waiting"][0]]), "waiting is"),
        (lambda x: x[28].update(preempted=[]), r"line 29 \(step 28\)"),
        (lambda x: x[1]["added"].append("r99"), "r99 was added, but the file of requests does not name it"),
        (lambda x: x[-1]["tokens"]["r3"].append(7), "last line: r3"),
        (lambda x: x[0].pop("engine_args"), "line 1: not the config line"),
        (lambda x: x[0]["engine_args"].pop("block_size"), "engine_args lacks 'block_size'"),
        (lambda x: x.__setitem__(slice(1, None), []), "it holds no step"),
    ],
)
def test_what_does_not_fit_is_named_with_its_line(
    folder: Path, tmp_path: Path, change: Any, what: str
) -> None:
    with pytest.raises(TraceError, match=what):
        import_recording(broken(folder, tmp_path, change))


def test_files_that_are_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot open"):
        import_recording(tmp_path / "none.jsonl")
    (tmp_path / "x.jsonl").write_text("not json\n")
    with pytest.raises(TraceError, match="line 1: not a line of a recording"):
        import_recording(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl.gz").write_bytes((folder / "alone.jsonl.gz").read_bytes()[:500])
    with pytest.raises(TraceError, match="not a complete gzip file"):
        import_recording(tmp_path / "x.jsonl.gz")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(TraceError, match="is empty"):
        import_recording(tmp_path / "empty.jsonl")
    shutil.copy(folder / "alone.jsonl.gz", tmp_path / "alone.jsonl.gz")
    with pytest.raises(TraceError, match=r"names its requests in .*workload\.json"):
        import_recording(tmp_path / "alone.jsonl.gz")
    assert len(import_recording(tmp_path / "alone.jsonl.gz", workload=folder / "workload.json")) == 999
