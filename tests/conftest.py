"""What all tests share: where the recordings lie, what a missing tool means, and which tests may not run side
by side.

Where something is absent (recordings, a browser, a card) a test skips and says so; on a build server (`CI` is
set) it fails, unless it needs a card.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("model", "browser", "slow", "gpu")

# Two cores are the smallest machine that this is meant for; more threads than that make the figures depend on
# the machine. Read by torch when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Nothing may ask a hub for anything: what a test needs is on the disk.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process they
# start; some tests are about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no fault of the code; and on a build server the same examples come up every time.
settings.register_profile(
    "cbviz",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("cbviz")


def absent(reason: str) -> None:
    """Ends a test that lacks something: skipped at a desk, failed on a build server."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def recordings(variable: str, default: str) -> Path:
    """The folder that `variable` names, by default `default` relative to the repository root."""
    folder = Path(os.environ.get(variable) or ROOT / default)
    if not folder.is_dir():
        absent(f"{variable}: no folder {folder}")
    return folder


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """So many threads for torch, and for whoever asks the environment."""
    import torch

    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(n))
        torch.set_num_threads(n)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Other tests may run beside these on two cores, and operators this small gain nothing by a second
    thread: it would mostly wait.
    """
    with torch_threads(1):
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def conformance() -> Path:
    """Recordings of other engines, one folder an engine."""
    return recordings("CBVIZ_CONFORMANCE", "../shared/conformance")


@pytest.fixture(scope="session")
def data() -> Path:
    """Traces, device and model tables, operator profiles."""
    return recordings("CBVIZ_DATA", "../shared/data")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the system's Chromium."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    absent("no Chromium on this machine (Debian: apt-get install chromium)")
    raise AssertionError("unreachable")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Light tests first; heavy ones in one group, so that `-n 2 --dist loadgroup` never runs two of them at
    once. `deep` ones only where `-m` asks for something.
    """
    if not config.getoption("-m"):
        config.hook.pytest_deselected(items=[i for i in items if i.get_closest_marker("deep")])
        items[:] = [i for i in items if not i.get_closest_marker("deep")]

    def weight(item: pytest.Item) -> int:
        return max((HEAVY.index(m.name) + 1 for m in item.iter_markers() if m.name in HEAVY), default=0)

    items.sort(key=weight)
    for item in items:
        if weight(item):
            item.add_marker(pytest.mark.xdist_group("heavy"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA card on this machine")
