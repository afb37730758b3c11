"""`cbviz import` and the exports of what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from cbviz.cli import main
from cbviz.trace import load


def call(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, args)))
    return end.value.code if isinstance(end.value.code, int) else 0


def test_import_then_export(conformance: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.jsonl.gz"
    assert call("import", conformance / "vllm-0.32-inproc" / "fcfs_b64_prefix.jsonl.gz", "--out", out) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(out) and "measured by it" in told.err and "no cost" in told.err
    assert len(load(out)) == 281
    assert call("export", out, "--to", "prometheus") == 0
    assert "vllm:generation_tokens_total{" in (tmp_path / "run.prom").read_text()
    assert (
        call("export", out, "--to", "perfetto") == 0
        and (tmp_path / "run.perfetto.json").stat().st_size > 1000
    )
    assert call("export", out, "--to", "csv") == 0 and (tmp_path / "run.steps.csv").exists()


def test_several_files_go_to_a_folder(
    conformance: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = conformance / "vllm-0.32-inproc"
    files = folder / "prio_b64_prefix.jsonl.gz", folder / "ngram3_b64_prefix.jsonl.gz"
    assert call("import", *files, "--out", tmp_path / "one.jsonl") == 2
    assert "name a folder" in capsys.readouterr().err
    assert call("import", *files, "--out", tmp_path / "all") == 0
    assert [p.name for p in sorted((tmp_path / "all").iterdir())] == [
        "ngram3_b64_prefix.cbviz.jsonl.gz",
        "prio_b64_prefix.cbviz.jsonl.gz",
    ]


def test_what_is_no_recording_is_one_line(conformance: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("import", conformance / "vllm-0.32-inproc" / "workload.json") == 2
    assert capsys.readouterr().err.count("\n") == 1
