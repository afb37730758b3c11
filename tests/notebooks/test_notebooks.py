"""Every notebook runs from top to bottom, shows the figures that it tells of, and says so and goes on where
the model can't be had.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from cbviz.trace.schema import encode
from cbviz.trace.trace import load
from tests.notebooks import incident

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
LESSONS = sorted(p.name for p in FOLDER.glob("[01]*.ipynb"))
REAL = ("00", "01", "02", "04", "06", "09", "10")
"""Those that run the real model."""
FIGURE, WIDGET = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"

# What each must print, word for word: counted or modelled figures, the same on every machine.
TELLS: dict[str, tuple[str, ...]] = {
    "00": ("was preempted for", "63 blocks: 148 steps, 0 preemptions"),
    "01": (
        "20 requests, 975 prompt tokens, 2160 output tokens",
        "13.855 s",
        "12.960 s   1.07x",
        "prompts charged 13.855 s   1.00x",
        "4.386 s",
        "3.087 s",
        "3.216 s",
        "2.132 s",
        "1.36x",
        "1.45x",
        "2.06x",
        "815",
        "555",
        "581",
        "364",
        "the tokens are the same under both schedules: True",
    ),
    "02": (
        "= 0.07 s = 70 ms",
        "141 GB of weights",
        "131,072 bytes a token",
        "decode, batch 1           1.0 operations a byte -> memory-bound",
        "-> compute-bound",
        "the formula says 23,040",
    ),
    "03": (
        (
            "step 4: by hand {'a': [1, 2, 3, 6], 'b': [4, 5]}, the engine {'a': [1, 2, 3, 6], 'b': [4, 5]}, "
            "right"
        ),
        "26.7%",
        "94.2%",
        "count-the-blocks: ",
    ),
    "04": (
        "b: 8 of 10 tokens found",
        "c: 0 of 10 tokens found",
        "d: 4 of 8 tokens found",
        "one token must be computed to get logits",
        "the same tokens with and without the cache: True",
        "ABCABC in 10 blocks: hits [0, 0, 0, 16, 16, 16]",
        "count-the-hits: ",
    ),
    "05": (
        "r8, last to arrive, was preempted for r2",
        "nobody is admitted in a step that preempted",
        "name-the-victim: ",
    ),
    "06": ("step 12: 5 decodes, 59 of r6", "299.1 ms", "predict-the-step: ", "meet-the-slo: "),
    "07": (
        "long is starving: 8 later requests were admitted",
        "PolicyError: policy dice",
        "policy was changed from fcfs to aged",
        "beat-fcfs: ",
    ),
    "08": (
        "31 of 60 requests took more than 200 ms",
        "watermark was changed from 0.0 to 0.5",
        "are free above the watermark",
        "old watermark",
    ),
    "09": (
        "the same words: True",
        "accept-the-drafts: ",
        "32                  7.9",
        "they share 3 blocks of its prompt",
        "the second answer alone is the same: True",
    ),
    "10": (
        "int8                    30 ",
        "window 64, 4 sinks                        9                6",
        "contiguous                    40.8%          5.7%     31.5%       10.8%",
        "the same tokens in all three: True",
        "the longest free run has 3 (external fragmentation)",
        "68.6",
        "the same tokens in both: True",
        "fill-the-pool: ",
    ),
}


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Any]:
    """Runs a notebook in a copy of its folder, so that nothing it writes stays.

    Returns it with its outputs; an error of a cell is an error here.
    """

    def go(name: str) -> Any:
        folder = tmp_path / "notebooks"
        shutil.copytree(FOLDER, folder)
        nb = nbformat.read(folder / name, as_version=4)
        NotebookClient(
            nb, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        ).execute()
        assert (
            sorted(p.name for p in folder.iterdir() if p.suffix == ".json") == []
        )  # reports are written when asked for, and not before
        return nb

    return go


def outputs(nb: Any) -> list[Any]:
    return [o for c in nb.cells if c.cell_type == "code" for o in c.outputs]


def words(nb: Any) -> str:
    """All that was printed or shown as text."""
    return "\n".join(
        o.text if o.output_type == "stream" else str(o.get("data", {}).get("text/plain", ""))
        for o in outputs(nb)
    )


def check(nb: Any, number: str) -> None:
    said = words(nb)
    assert [t for t in TELLS[number] if t not in said] == [], said
    assert [o for o in outputs(nb) if o.output_type == "stream" and o.name == "stderr"] == []
    kinds = [kind for o in outputs(nb) if "data" in o for kind in o.data]
    assert kinds.count(FIGURE) >= (1 if number != "07" else 2), kinds
    if number in ("00", "02", "07", "08"):
        assert WIDGET in kinds
    for o in outputs(nb):  # a figure with nothing in it tells nothing
        if FIGURE in o.get("data", {}):
            assert any(
                any(len(t.get(k) or ()) for k in ("x", "y", "z", "cells")) for t in o.data[FIGURE]["data"]
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.model if n[:2] in REAL else ()) for n in LESSONS]
)
def test_it_runs(run: Callable[[str], Any], name: str) -> None:
    nb = run(name)
    check(nb, name[:2])
    if name[:2] in REAL:
        assert "The real model smollm2 is here" in words(nb)
    if name[:2] == "02":
        assert "= 23,040 bytes a token" in words(nb)
    if name[:2] == "09":
        assert "r0 alone is bit for bit r0 among others" in words(
            nb
        ) and "but its numbers differ from those among others" in words(nb)
    if name[:2] == "08":
        said = {
            m[1]: [float(m[2]), float(m[3])]
            for m in re.finditer(
                r"^(as it was|old budget|old watermark) +([\d.]+) ms +([\d.]+) ms", words(nb), re.MULTILINE
            )
        }
        assert said["old watermark"][1] < said["as it was"][1] / 5  # the proof proves something
        assert abs(said["old budget"][1] - said["as it was"][1]) < 0.1 * said["as it was"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LESSONS if n[:2] in REAL])
def test_without_the_model_it_says_so_and_goes_on(
    run: Callable[[str], Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing can be fetched
    nb = run(name)
    check(nb, name[:2])
    assert "the simulator goes on in its place" in words(nb)
    assert "measured here" not in words(nb)


def test_there_are_eleven() -> None:
    assert [n[:2] for n in LESSONS] == [f"{i:02}" for i in range(11)] == list(TELLS)


@pytest.mark.parametrize("name", LESSONS)
def test_form(name: str) -> None:
    """Outputs stripped, ids that last, opens with a question, ends with what can be predicted and, but for
    the tour, with sources.
    """
    nb = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(nb)
    assert (nb.nbformat, nb.nbformat_minor) == (4, 5)
    ids = [c.id for c in nb.cells]
    assert len(set(ids)) == len(ids) and not any(
        re.fullmatch(r"[0-9a-f]{8}", i) for i in ids
    )  # given, not drawn
    assert all(c.outputs == [] and c.execution_count is None for c in nb.cells if c.cell_type == "code")
    assert nb.cells[0].cell_type == "markdown" and "**The question.**" in nb.cells[0].source
    assert "## What you can now predict" in nb.cells[-1].source
    assert name == "00_tour.ipynb" or "*Sources*" in nb.cells[-1].source
    for path in re.findall(r"`((?:cbviz|tests|docs|data)/[\w/.]+)`", "\n".join(c.source for c in nb.cells)):
        assert (ROOT / path).exists() or (FOLDER / path).exists(), f"{name} names {path}"


def test_the_prose_is_short() -> None:
    for name in LESSONS:
        prose = " ".join(
            c.source for c in nbformat.read(FOLDER / name, as_version=4).cells if c.cell_type == "markdown"
        )
        assert len(prose.split()) < 1000, (
            f"{name}: {len(prose.split())} words; ten to fifteen minutes are wanted"
        )


def test_the_incident_is_what_its_script_makes() -> None:
    shipped, made = load(incident.FILE), incident.make()
    assert incident.FILE.stat().st_size < 200_000
    assert [encode(r) for r in shipped] == [encode(r) for r in made]
    assert shipped.header.config == made.header.config
