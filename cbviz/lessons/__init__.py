"""Exercises of the notebooks, checked by the engine itself: `exercise("name-the-victim")`, then show, hint,
check; `report("Ada")` writes what was reached.

Owns the list of exercises, points and the report. An answer is a function or a configuration, and it is held
against cases that are drawn anew at every check, so a printed answer does not pass. Knows no widget and no
server.

    from cbviz import lessons
    ex = lessons.exercise("count-the-blocks")
    ex.show()
    ex.check(lambda case: {"paged": 1, "reserved": 1, "empty": 0})
"""

from __future__ import annotations

import importlib.util

from cbviz.lessons.grading import Exercise, LessonError, Part, Result, exercise, exercises, grade, report
from cbviz.model import hub


def runner(model: str = "smollm2") -> str:
    """`torch` if PyTorch is installed and the model is here or can be fetched, else `sim`; prints one
    sentence that says which, and why.
    """
    if importlib.util.find_spec("torch") is None:
        print(
            "PyTorch is not installed: the simulator goes on in the real model's place. Its tokens are "
            "made up and its times are modelled."
        )
        return "sim"
    try:
        hub.resolve(model)
    except hub.ModelError as e:
        print(
            f"The model can't be had ({e}): the simulator goes on in its place. Its tokens are made up and "
            "its times are modelled."
        )
        return "sim"
    print(
        f"The real model {model} is here: its tokens are computed and its times are measured on this machine."
    )
    return "torch"


__all__ = ["Exercise", "LessonError", "Part", "Result", "exercise", "exercises", "grade", "report", "runner"]
