"""What repo2docker reads: the environment brings no CUDA, the scripts are scripts, and a server behind a base URL and a token serves the explorer."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.browser.conftest import Tab, a_port, serving

ROOT = Path(__file__).resolve().parents[2]
BINDER = ROOT / "binder"
SCRIPTS = ("postBuild", "start")
pytest_plugins = ["tests.browser.conftest"]


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
    assert not [f for f in ("Dockerfile", "requirements.txt", "runtime.txt", "Pipfile", "default.nix", "apt.txt") if (BINDER / f).exists()]
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
    """`start` runs what it is given, with its arguments as they are, and puts our folders in front of the user's."""
    show = "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['JUPYTER_PATH'], os.environ['JUPYTER_CONFIG_PATH']]))"
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "JUPYTER_PATH": "/mine"}
    done = subprocess.run([str(BINDER / "start"), sys.executable, "-c", show, "a b", "--x=*"], env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert yaml.safe_load(done.stdout) == [["a b", "--x=*"], f"{ROOT}/cbviz/app/jupyter:/mine", f"{ROOT}/binder/jupyter"]


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_behind_a_base_url_and_a_token(open_tab: Callable[..., Tab], cache: Path, tmp_path: Path) -> None:
    """As on Binder: JupyterLab under the user's path, with a token, and our page through Voilà's extension; light, because memory is short."""
    port = a_port()
    base = f"http://127.0.0.1:{port}/user/abc/"
    command: list[Any] = [BINDER / "start", sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}",
                          f"--ServerApp.root_dir={ROOT}", "--ServerApp.base_url=/user/abc/", "--IdentityProvider.token=tok"]
    env = {**os.environ, "CBVIZ_CACHE": str(cache), "MEM_LIMIT": str(500_000_000), "HOME": str(tmp_path), "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
           "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces")}
    env.pop("CBVIZ_MODEL", None)
    with serving([str(c) for c in command], env, base, tmp_path / "log"):
        page = f"{base}voila/render/notebooks/explorer.ipynb"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{base}api/kernels"), timeout=30)
        assert refused.value.code == 403
        tab = open_tab(f"{page}?token=tok&scenario=preemption&num_blocks=40")
        tab.ready()
        tab.step(3)
        said = tab.page.inner_text(".cb-head"), tab.page.inner_text(".cb-notes")
        assert "recorded tokens" in said[0]
        assert "Light mode" in said[1]
        assert len(tab.state()["owners"]) == 40
        assert tab.page.evaluate("cbviz.text('r1')")
        # Our template, not Voilà's own: nothing around the explorer.
        assert tab.page.evaluate("document.querySelector('.cb-root').getBoundingClientRect().top") == 0
