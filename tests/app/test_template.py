"""Voilà's page holds no script of its own text, so that a Content-Security-Policy can forbid those; what it
loads comes from the same server.
"""

from __future__ import annotations

import re

from cbviz.app.serve import JUPYTER, TEMPLATE

FOLDER = JUPYTER / "voila" / "templates" / TEMPLATE


def test_scripts_in_the_template_are_files_or_data() -> None:
    source = (FOLDER / "index.html.j2").read_text("utf-8")
    scripts = re.findall(r"<script([^>]*)>", source)
    assert scripts
    for attributes in scripts:
        assert 'type="application/json"' in attributes or "src=" in attributes, attributes
    assert not re.search(r"<[^>]*\son\w+=", source)
    for name in re.findall(r"{{ static }}/([\w.]+)", source):
        assert (FOLDER / "static" / name).exists(), name


def test_blocks_of_voilas_template_that_hold_scripts_are_replaced() -> None:
    """Voilà's own template has scripts in these blocks: the helpers and the progress of each cell."""
    source = (FOLDER / "index.html.j2").read_text("utf-8")
    for block in (
        "html_head_js",
        "html_head_js_mermaidjs",
        "notebook_css",
        "body_header",
        "body_loop",
        "any_cell",
        "body_footer",
    ):
        assert re.search(rf"{{%-? *block {block}\b", source), block
    assert "voila_setup_helper_functions" not in source
