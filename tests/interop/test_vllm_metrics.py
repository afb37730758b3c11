"""Every exported count, compared with what a real vLLM's registry held after the same step (`cbviz bench
record FOLDER --metrics`).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from cbviz.bench.metrics_record import WORKLOADS, record_metrics
from cbviz.bench.peer import find_python
from cbviz.interop.prometheus import number, to_prometheus
from cbviz.interop.vllm_metrics import NAMES, NOT_EXPORTED, bucket_bounds
from cbviz.messages import RequestSpec, Sampling
from cbviz.session import Session
from tests.interop.vllm_replay import FOLDER, load, replay

OWN_LABELS = ("model_name", "engine", "clock")


def samples(text: str) -> dict[str, float]:
    """The samples of a Prometheus text, without creation times and the labels that name the server."""
    out: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.startswith("vllm:"):
            continue
        sample, value = line.rsplit(" ", 1)
        name, _, inside = sample.partition("{")
        labels = sorted(pair for pair in re.findall(r'(\w+)="([^"]*)"', inside) if pair[0] not in OWN_LABELS)
        if not name.endswith("_created"):
            out[name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels) + "}" if labels else "")] = float(
                value
            )
    return out


def family(sample: str) -> str:
    """The metric that a sample belongs to."""
    name = sample.partition("{")[0]
    if name in NAMES or name in NOT_EXPORTED:
        return name
    return re.sub(r"_(bucket|sum|count)$", "", name)


def counts(found: dict[str, float]) -> dict[str, float]:
    """Samples of exported metrics that do not depend on a clock.

    Of histograms of seconds the number of observations is one.
    """
    out = {}
    for sample, value in found.items():
        name = family(sample)
        if name in NAMES and (not name.endswith("_seconds") or sample.endswith("_count")):
            out[sample] = value
    return out


def different(
    ours: dict[str, float], theirs: dict[str, float]
) -> dict[str, tuple[float | None, float | None]]:
    """Samples that are not equal, as (ours, theirs)."""
    out: dict[str, tuple[float | None, float | None]] = {}
    for sample in ours.keys() | theirs.keys():
        x, y = ours.get(sample), theirs.get(sample)
        if x is None or y is None or abs(x - y) > 1e-12:
            out[sample] = x, y
    return out


def without_buckets(found: dict[str, float]) -> dict[str, float]:
    return {sample: value for sample, value in found.items() if "_bucket" not in sample}


@pytest.mark.parametrize("name", [n for n in WORKLOADS if n != "sequences"])
def test_every_count_is_equal_after_every_step(name: str) -> None:
    recording = load(name)
    trace = replay(recording)
    theirs = dict(recording["before"])
    assert len(trace) == len(recording["steps"])
    for step, row in enumerate(recording["steps"], 1):
        theirs.update(row["metrics"])
        ours = counts(samples(to_prometheus(trace, step)))
        assert different(without_buckets(ours), counts(theirs)) == {}, step
    assert different(ours, counts({**theirs, **recording["buckets"]})) == {}


def test_of_several_sequences_only_the_marked_counts_differ() -> None:
    recording = load("sequences")
    theirs = dict(recording["before"])
    for row in recording["steps"]:
        theirs.update(row["metrics"])
    found = different(
        counts(samples(to_prometheus(replay(recording)))), counts({**theirs, **recording["buckets"]})
    )
    assert found, "vLLM computes the prompt once a sequence, cbviz once a request"
    assert {family(sample) for sample in found if "n > 1" not in NAMES[family(sample)].here} == set()


def test_a_wrong_count_would_be_seen() -> None:
    ours = {"vllm:num_preemptions_total": 3.0, "vllm:prompt_tokens_total": 5.0}
    assert different(ours, {"vllm:num_preemptions_total": 4.0}) == {
        "vllm:num_preemptions_total": (3.0, 4.0),
        "vllm:prompt_tokens_total": (5.0, None),
    }


@pytest.mark.parametrize(
    ("workload", "sample"),
    [
        ("preemption", "vllm:num_preemptions_total"),
        ("priority", "vllm:num_preemptions_total"),
        ("shared-prefix", "vllm:prefix_cache_hits_total"),
        ("ends", 'vllm:request_success_total{finished_reason="stop"}'),
        ("drafts", "vllm:spec_decode_num_accepted_tokens_total"),
        ("sequences", "vllm:request_params_n_sum"),
    ],
)
def test_the_workloads_meet_what_they_are_for(workload: str, sample: str) -> None:
    values = [row["metrics"][sample] for row in load(workload)["steps"] if sample in row["metrics"]]
    assert values[-1] > 0


def test_drafts_behind_the_end_of_a_request_were_met() -> None:
    assert any("beyond" in row for row in load("drafts")["steps"])


def test_recordings_are_those_of_the_workloads() -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.json")) == sorted(WORKLOADS)
    for name, make in WORKLOADS.items():
        recording = load(name)
        assert {"config": recording["config"], "requests": recording["requests"]} == json.loads(
            json.dumps(make())
        ), name


def check_names(found: dict[str, float], bounds: dict[str, list[str]], max_model_len: int) -> None:
    """Every name of vLLM's is exported or said not to be, every exported name is vLLM's, and buckets have
    vLLM's bounds.
    """
    families = {family(sample) for sample in found}
    assert families <= NAMES.keys() | NOT_EXPORTED.keys()
    assert NAMES.keys() - families <= {name for name in NAMES if "spec_decode" in name}
    for name, ours in bounds.items():
        if name in NAMES:
            assert [*(number(b) for b in bucket_bounds(name, max_model_len)), "+Inf"] == ours, name


@pytest.mark.parametrize("name", WORKLOADS)
def test_names_and_buckets_are_vllms(name: str) -> None:
    recording = load(name)
    last = {sample for row in recording["steps"] for sample in row["metrics"]}
    check_names(
        dict.fromkeys([*recording["before"], *last], 0.0),
        recording["bounds"],
        recording["config"]["max_model_len"],
    )


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_a_vllm_that_is_there_counts_as_the_recorded_one_did(tmp_path: Path) -> None:
    python = os.environ.get("CBVIZ_VLLM_PYTHON") or find_python(None)
    if python is None:
        pytest.skip("no vLLM: CBVIZ_VLLM_PYTHON names a Python that has it")
    version = record_metrics(tmp_path, python)
    if not version.startswith("0.32."):
        pytest.skip(f"vLLM {version} is there, the recordings are of 0.32")
    for name in WORKLOADS:
        fresh = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        assert fresh == load(name), name


# a server's scrape, where there is one ----------------------------------------------------------------------


@pytest.fixture
def server(data: Path) -> Path:
    """The folder with what a vLLM server wrote: its scrape and the benchmark's result."""
    folder = data / "vllm-serve"
    if not (folder / "metrics_last.txt").is_file():
        pytest.skip(f"no scrape of a vLLM server in {folder}")
    return folder


@pytest.fixture
def scrape(server: Path) -> str:
    return (server / "metrics_last.txt").read_text(encoding="utf-8")


def test_names_and_buckets_are_those_of_a_server(scrape: str) -> None:
    bounds: dict[str, list[str]] = {}
    for name, bound in re.findall(r'^(vllm:\w+)_bucket\{[^}]*le="([^"]+)"', scrape, re.MULTILINE):
        bounds.setdefault(name, []).append(bound)
    check_names(samples(scrape), bounds, 512)
    assert any("spec_decode" in sample for sample in samples(scrape))
    types = dict(re.findall(r"^# TYPE (vllm:\S+) (\w+)$", scrape, re.MULTILINE))
    assert {name: types[name] for name in NAMES} == {name: d.kind for name, d in NAMES.items()}


def _served(server: Path) -> list[RequestSpec]:
    """The server's 43 requests: 40 of the benchmark, which begin with the same 96 tokens, and three by hand
    (5, 5 and 33 prompt tokens).
    """
    bench: dict[str, Any] = json.loads((server / "bench.json").read_text(encoding="utf-8"))
    begin = min(bench["start_times"])
    out = []
    for i, (prompt, output, at) in enumerate(
        zip(bench["input_lens"], bench["output_lens"], bench["start_times"], strict=True)
    ):
        ids = tuple(range(96)) + tuple(1000 + 300 * i + k for k in range(prompt - 96))
        out.append(
            RequestSpec(f"b{i}", ids, output, arrival_s=at - begin, sampling=Sampling(ignore_eos=True))
        )
    by_hand = (5, 5, 33)
    for i, prompt in enumerate(by_hand):
        ids = tuple(30_000 + 100 * i + k for k in range(prompt))
        out.append(RequestSpec(f"h{i}", ids, 8, arrival_s=1000.0 + i, sampling=Sampling(ignore_eos=True)))
    return out


NOT_ITS_SCHEDULE = (
    "vllm:num_preemptions_total", "vllm:request_num_preemptions", "vllm:iteration_tokens_total", "vllm:inter_token_latency_seconds",
    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
)  # fmt: skip
"""Counts that follow from which steps were made: here they come from modelled time and other words, so that
preemptions and drafts fall otherwise.
"""


def test_a_servers_scrape_line_by_line(server: Path, scrape: str) -> None:
    """The same requests at the same times: every line is equal, except those that depend on the length of
    each step and the words.
    """
    s = Session(
        _served(server),
        runner="sim",
        discipline="vllm",
        max_model_len=512,
        max_num_seqs=8,
        block_size=32,
        num_blocks=36,
        max_num_batched_tokens=128,
        enable_prefix_caching=True,
        speculative="ngram",
        num_speculative_tokens=3,
    )
    s.run()
    found = different(counts(samples(to_prometheus(s.trace))), counts(samples(scrape)))
    assert {family(sample) for sample in found} <= set(NOT_ITS_SCHEDULE), found
