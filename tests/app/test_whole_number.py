"""A number that comes as text from outside, such as an address or an environment variable, is read or refused;
no text ends in an error of Python's own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cbviz import doctor
from cbviz.app.allowed import Allowed
from cbviz.app.opening import SIM, Settings
from cbviz.config import ConfigError, whole_number
from cbviz.textfile import LIMIT_VARIABLE as UNPACKED_VARIABLE
from cbviz.textfile import unpacked_limit
from cbviz.trace import autosave

NO_NUMBERS = ["²", "٣", "1²", "৪৪", "-1", "+1", "1_000", " 1", "1.0", "", "9" * 19, "9" * 5000]
"""`str.isdigit` holds for some of them; `int` fails on some, and takes others that nobody meant."""


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_a_text_that_is_no_plain_number_is_none(text: str) -> None:
    assert whole_number(text) is None


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_a_link_to_a_step_that_is_no_number_opens_without_it_and_says_so(text: str) -> None:
    _, place, problems = Allowed(Settings("article", SIM), alone=True).link(f"step={text}")
    assert "step" not in place
    assert any("whole number" in p for p in problems)


def test_a_link_to_a_step_opens_there() -> None:
    _, place, problems = Allowed(Settings("article", SIM), alone=True).link("step=12")
    assert place == {"step": "12"} and not problems


def _threads() -> object:
    pytest.importorskip("torch")
    from cbviz.model import threads

    assert threads.use_available_cpus() == threads.available_cpus()
    return None


@pytest.mark.parametrize("text", [t for t in NO_NUMBERS if t])
@pytest.mark.parametrize(
    ("variable", "read"),
    [
        ("OMP_NUM_THREADS", doctor._threads),
        ("OMP_NUM_THREADS", _threads),
        (autosave.LIMIT_VARIABLE, autosave.default_limit),
    ],
)
def test_a_variable_that_is_no_number_counts_as_not_set(
    variable: str, read: Callable[[], object], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    unset = read()
    monkeypatch.setenv(variable, text)
    assert read() == unset


@pytest.mark.parametrize("text", [t for t in NO_NUMBERS if t])
def test_a_limit_of_unpacking_that_is_no_number_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNPACKED_VARIABLE, text)
    with pytest.raises(ConfigError, match=UNPACKED_VARIABLE):
        unpacked_limit()
