"""Binder's server: JupyterLab behind a base URL and a token, with Voilà as its extension."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Tab, a_port, serving

ROOT = Path(__file__).resolve().parents[2]
BINDER = ROOT / "binder"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("heavy"),
]


def test_behind_a_base_url_and_a_token(open_tab: Callable[..., Tab], cache: Path, tmp_path: Path) -> None:
    """As on Binder: JupyterLab under the user's path, with a token, and our page through Voilà's extension;
    light, because memory is short.
    """
    port = a_port()
    base = f"http://127.0.0.1:{port}/user/abc/"
    command: list[Any] = [
        BINDER / "start",
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        f"--ServerApp.root_dir={ROOT}",
        "--ServerApp.base_url=/user/abc/",
        "--IdentityProvider.token=tok",
    ]
    env = {
        **os.environ,
        "CBVIZ_CACHE": str(cache),
        "MEM_LIMIT": str(500_000_000),
        "HOME": str(tmp_path),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
    }
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
