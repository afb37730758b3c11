"""The repository's text speaks of the project alone: no machine's paths, no package host, no script from a
content network.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~-])/(?:home|Users|root|work|opt/wheels|opt/pypi)/[\w.]",
    "a temporary path of one machine": r"(?<![\w.-])/tmp/[\w.]",
    "a package host": r"(?:pypi\.org|pythonhosted\.org|registry\.npmjs|deb\.debian\.org|download\.pytorch\.org|proxy\.golang)",
    "a content network": r"(?:cdn\.jsdelivr|unpkg\.com|cdnjs\.cloudflare|cdn\.plot\.ly|fonts\.g(?:oogleapis|static))",
    "a folder beside the checkout other than the recordings' defaults": r"\.\./shared(?!/(?:conformance|data)\b)",
}


def faults(text: str) -> list[str]:
    """`line: what: the match`, for every forbidden pattern in `text`."""
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        for what, pattern in FORBIDDEN.items():
            if match := re.search(pattern, line):
                out.append(f"{number}: {what}: {match[0]}")
    return out


def tracked() -> list[Path]:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_tracked_files() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__).resolve():  # its own samples below
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{path.relative_to(ROOT)}:{fault}" for fault in faults(text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "see /home/ann/x",
        "open('/work/main')",
        "/tmp/run.jsonl",
        "--index-url https://pypi.org/simple",
        "<script src=https://cdn.jsdelivr.net/x>",
        "../shared/notes.md",
    ],
)
def test_a_stray_path_is_seen(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize(
    "text", ["../shared/conformance", "notebooks/work/x", "~/work/x", "tests/home/x", "/usr/bin/chromium"]
)
def test_ordinary_text_is_let_through(text: str) -> None:
    assert faults(text) == []
