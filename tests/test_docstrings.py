"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    "cbviz.config",
    "cbviz.core.kv.block_pool",
    "cbviz.core.policy",
    "cbviz.session",
    "cbviz.trace.compare",
    "cbviz.trace.trace",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed
