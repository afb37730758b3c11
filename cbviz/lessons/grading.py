"""What all exercises share: points in parts, hints, hidden draws, and the report that a teacher collects.

Knows no exercise from inside.

The report is a plain JSON file of what one person reached: no server, no signature. It names the draw of
every check and keeps the source of the best answer, so whoever doubts a figure can read the answer, or grade
it again with `grade`.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import inspect
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

FIRST_HIDDEN = 1000
"""Cases drawn from seeds below this are those that are shown."""
FORMAT = "cbviz-lessons 1"


class LessonError(ValueError):
    """No such exercise, or an answer of the wrong kind. The message says what is wanted."""


@dataclass(frozen=True)
class Part:
    """One thing that an exercise asks.

    `share` (0..1) of its `points` were earned; `note` says what went wrong, or what was reached.
    """

    name: str
    points: int
    share: float
    note: str = ""
    wrong: dict[str, Any] | None = None
    """The first case that went wrong: `case`, what the `engine` says, and what you `said`."""

    @property
    def earned(self) -> float:
        return self.points * self.share


@dataclass(frozen=True)
class Result:
    """What an answer reached. Prints as a few lines of text."""

    exercise: str
    parts: tuple[Part, ...]
    seed: int
    """The draw that it was checked on."""

    @property
    def score(self) -> int:
        """0..100, rounded down, so that 100 means everything."""
        return int(sum(p.earned for p in self.parts) + 1e-9)

    @property
    def solved(self) -> bool:
        return all(p.share == 1 for p in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "exercise": self.exercise,
            "score": self.score,
            "solved": self.solved,
            "seed": self.seed,
            "parts": [
                {"name": p.name, "points": p.points, "earned": round(p.earned, 2), "note": p.note}
                for p in self.parts
            ],
        }

    def wrong(self) -> None:
        """Prints for each part the first case that went wrong."""
        for p in self.parts:
            if p.wrong is not None:
                print(
                    f"{p.name}\n{told(p.wrong['case'])}\n  the engine says: {p.wrong['engine']!r}\n  you "
                    f"said: {p.wrong['said']!r}\n"
                )
        if all(p.wrong is None for p in self.parts):
            print("No case went wrong.")

    def __str__(self) -> str:
        wide = max(len(p.name) for p in self.parts)
        lines = [
            f"{self.exercise}: {self.score} of {sum(p.points for p in self.parts)} points"
            + (", solved" if self.solved else "")
        ]
        lines += [
            f"  {p.name:<{wide}}  {p.earned:5.1f} of {p.points:3}" + (f"  {p.note}" if p.note else "")
            for p in self.parts
        ]
        if any(p.wrong is not None for p in self.parts):
            lines.append("  .wrong() prints the first case of each part that went wrong")
        return "\n".join(lines)

    __repr__ = __str__


def told(case: dict[str, Any]) -> str:
    """A case as lines of plain text."""
    lines = []
    for key, value in case.items():
        lines += (
            [f"  {key}:", *(f"    {row}" for row in value)]
            if isinstance(value, list)
            else [f"  {key}: {value}"]
        )
    return "\n".join(lines)


class Task(Protocol):
    """What an exercise must bring.

    `sample` draws what is shown; `grade` draws with a seed that nobody has seen and compares.
    """

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def question(self) -> str: ...

    @property
    def hints(self) -> tuple[str, ...]: ...

    def sample(self, seed: int) -> str: ...

    def grade(self, answer: Any, seed: int) -> list[Part]: ...


@dataclass
class _Score:
    attempts: int = 0
    hints: int = 0
    best: Result | None = None
    answer: str = ""
    checked: str = ""
    seeds: list[int] = field(default_factory=list)


_SCORES: dict[str, _Score] = {}
"""What was reached in this process, by exercise."""


class Exercise:
    """One exercise, as a student meets it."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._hints = 0

    @property
    def name(self) -> str:
        return self._task.name

    @property
    def title(self) -> str:
        return self._task.title

    def show(self, seed: int = 0) -> None:
        """Prints the question and a worked case; another `seed` (0..999) shows another case."""
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < FIRST_HIDDEN:
            raise LessonError(f"seed is {seed!r}, it must be a whole number in 0..{FIRST_HIDDEN - 1}")
        print(f"{self.title}\n\n{self._task.question}\n\n{self._task.sample(seed)}")

    def hint(self) -> None:
        """Prints the next hint; after the last one, that there is no more.

        Hints cost no points; the report says how many were taken.
        """
        hints = self._task.hints
        if self._hints >= len(hints):
            print("That was the last hint.")
            return
        print(f"Hint {self._hints + 1} of {len(hints)}: {hints[self._hints]}")
        self._hints += 1
        score = _SCORES.setdefault(self.name, _Score())
        score.hints = max(score.hints, self._hints)

    def check(self, answer: Any) -> Result:
        """Holds the answer against newly drawn cases.

        Each call draws others. Raises LessonError if the answer is of the wrong kind.
        """
        result = grade(self.name, answer, FIRST_HIDDEN + secrets.randbelow(2**31))
        score = _SCORES.setdefault(self.name, _Score())
        score.attempts += 1
        score.seeds.append(result.seed)
        if score.best is None or result.score > score.best.score:
            score.best, score.answer, score.checked = (
                result,
                _source(answer),
                datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            )
        return result

    def __repr__(self) -> str:
        best = _SCORES[self.name].best if self.name in _SCORES else None
        return (
            f"Exercise {self.name}: {self.title}"
            + (f" (best so far {best.score})" if best else "")
            + "\n.show() prints it, .hint() helps, .check(answer) checks"
        )


def _tasks() -> dict[str, Task]:
    from cbviz.lessons.tasks import TASKS

    return TASKS


def exercises() -> list[str]:
    """Names of all exercises, in the order of the notebooks."""
    return list(_tasks())


def exercise(name: str) -> Exercise:
    """The exercise called `name`. Raises LessonError with the nearest names."""
    tasks = _tasks()
    if name not in tasks:
        near = difflib.get_close_matches(str(name), tasks, n=1)
        raise LessonError(
            f"no exercise {name!r}; "
            + (f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(tasks)}")
        )
    return Exercise(tasks[name])


def grade(name: str, answer: Any, seed: int) -> Result:
    """Grades an answer on one draw, and keeps no record of it.

    Equal seeds draw equal cases: how a teacher checks a report.
    """
    exercise(name)
    return Result(name, tuple(_tasks()[name].grade(answer, seed)), seed)


def ask(f: Callable[..., Any], case: Any) -> tuple[Any, str]:
    """(the answer to one case, '') or (None, what went wrong).

    The student's function gets a copy, so it can't change the case.
    """
    try:
        return f(copy.deepcopy(case)), ""
    except Exception as e:
        return None, f"your function failed: {type(e).__name__}: {e}"


def must_be_function(answer: Any, arguments: str) -> None:
    """Raises LessonError unless the answer can be called."""
    if not callable(answer):
        raise LessonError(
            f"the answer is a function of {arguments}, not {type(answer).__name__}: it is tried on cases "
            "that you have not seen"
        )


def _source(answer: Any) -> str:
    """What the answer looked like: a function's source where it can be had, else its repr."""
    if callable(answer):
        try:
            return inspect.getsource(answer)
        except (OSError, TypeError):
            return repr(answer)
    return repr(answer)


def report(name: str, path: str | Path | None = None) -> Path:
    """Writes what was reached in this process as a JSON file, `cbviz-lessons-<name>.json` unless `path` says
    otherwise, and returns its path.

    An earlier report of the same person there is kept up, exercise by exercise: the best result stays,
    attempts and hints add up. So each notebook may report into the same file. Raises LessonError if the name
    is empty, or the file is somebody else's or no report.
    """
    who = name.strip() if isinstance(name, str) else ""
    if not who:
        raise LessonError("the name is empty: a report must say whose it is")
    target = (
        Path(path)
        if path is not None
        else Path(f"cbviz-lessons-{re.sub(r'[^a-z0-9]+', '-', who.lower()).strip('-') or 'report'}.json")
    )
    kept: dict[str, Any] = {}
    if target.exists():
        try:
            old = json.loads(target.read_text(encoding="utf-8"))
            kept = dict(old["exercises"]) if old["format"] == FORMAT else {}
            owner = old["name"]
        except (ValueError, KeyError, TypeError) as e:
            raise LessonError(
                f"{target} is there already and is no report of these exercises: name another file with path="
            ) from e
        if owner != who:
            raise LessonError(f"{target} is the report of {owner!r}: name another file with path=")
    for key, s in _SCORES.items():
        kept[key] = _merged(kept.get(key), s)
        # written once: a second call must not count the same attempts again
        _SCORES[key] = _Score(hints=s.hints, best=s.best, answer=s.answer, checked=s.checked)
    tasks = _tasks()
    whole = {
        "format": FORMAT,
        "name": who,
        "written": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cbviz": _version(),
        "total": sum(e["score"] for e in kept.values()),
        "of": 100 * len(tasks),
        "solved": [n for n in tasks if kept.get(n, {}).get("solved")],
        "exercises": {n: kept[n] for n in tasks if n in kept},
    }
    handle, part = tempfile.mkstemp(dir=target.resolve().parent, prefix=target.name)
    with os.fdopen(handle, "w", encoding="utf-8") as f:
        json.dump(whole, f, indent=1, ensure_ascii=False)
    os.chmod(part, 0o644)
    os.replace(part, target)
    return target


def _merged(old: dict[str, Any] | None, s: _Score) -> dict[str, Any]:
    best = s.best.to_dict() if s.best else {"score": 0, "solved": False, "parts": []}
    new = {**{k: v for k, v in best.items() if k != "exercise"}, "checked": s.checked, "answer": s.answer}
    if old is not None and old.get("score", 0) >= new["score"] and old.get("checked"):
        new = {k: v for k, v in old.items() if k not in ("attempts", "hints", "seeds")}
    return {
        **new,
        "attempts": s.attempts + (old or {}).get("attempts", 0),
        "hints": max(s.hints, (old or {}).get("hints", 0)),
        "seeds": [*(old or {}).get("seeds", []), *s.seeds],
    }


def _version() -> str:
    import cbviz

    return cbviz.__version__


__all__ = [
    "FIRST_HIDDEN",
    "Exercise",
    "LessonError",
    "Part",
    "Result",
    "Task",
    "ask",
    "exercise",
    "exercises",
    "grade",
    "must_be_function",
    "report",
    "told",
]
