"""Voilà's settings for the explorer, behind the user's own, which win."""

from cbviz.app.serve import configure_voila

configure_voila(c)  # type: ignore[name-defined]  # noqa: F821  # Voilà puts `c` into this file
