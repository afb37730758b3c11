"""What repo2docker reads: the environment brings no CUDA, and the scripts are scripts.
tests/browser/test_binder.py has the server.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BINDER = ROOT / "binder"
SCRIPTS = ("postBuild", "start")


def test_environment() -> None:
    """repo2docker's own rules: a mapping with a list of dependencies; and no package that brings CUDA."""
    env = yaml.safe_load((BINDER / "environment.yml").read_text("utf-8"))
    assert env["channels"][0] == "conda-forge"
    names = [re.split(r"[<>=! ]", d)[0] for d in env["dependencies"] if isinstance(d, str)]
    assert {"python", "pip", "pytorch-cpu"} <= set(names)
    assert not [n for n in names if re.search(r"cuda|gpu|nvidia|triton|cudnn|^torch$|^pytorch$", n)]
    python = next(d for d in env["dependencies"] if isinstance(d, str) and d.startswith("python="))
    assert re.fullmatch(r"python=3\.1[0-4]", python)
    # Files that repo2docker would prefer to, or mix with, environment.yml.
    assert not [
        f
        for f in ("Dockerfile", "requirements.txt", "runtime.txt", "Pipfile", "default.nix", "apt.txt")
        if (BINDER / f).exists()
    ]
    assert not (ROOT / ".binder").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str) -> None:
    path = BINDER / name
    text = path.read_text("utf-8")
    assert text.startswith("#!/bin/bash\n")
    assert path.stat().st_mode & stat.S_IXUSR
    assert b"\r" not in path.read_bytes()
    assert not re.search(r"nvidia|cu\d\d\d|download\.pytorch", text)
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    if name == "start":
        assert text.rstrip().endswith('exec "$@"')


def test_start_hands_over(tmp_path: Path) -> None:
    """`start` runs what it is given, with its arguments as they are, and puts our folders in front of the
    user's.
    """
    show = (
        "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['JUPYTER_PATH'], "
        "os.environ['JUPYTER_CONFIG_PATH']]))"
    )
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "JUPYTER_PATH": "/mine"}
    done = subprocess.run(
        [str(BINDER / "start"), sys.executable, "-c", show, "a b", "--x=*"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert yaml.safe_load(done.stdout) == [
        ["a b", "--x=*"],
        f"{ROOT}/cbviz/app/jupyter:/mine",
        f"{ROOT}/binder/jupyter",
    ]
