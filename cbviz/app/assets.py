"""What the browser is given: our own ES modules linked into one script, the style sheet, and plotly.js from
the installed package.

Nothing is fetched from elsewhere, and nothing of others is copied into the repository. Knows no session.
"""

from __future__ import annotations

import functools
import gzip
import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"(\.\.?/[\w./-]+)";[^\n]*\n', re.M)
_DESCRIPTION = re.compile(r"^[ \t]*/\*\*(?:(?!\*/).)*\*/[ \t]*\n", re.M | re.S)
"""A block that describes and types what follows; a cast inside a line is none."""
_EXPORT = re.compile(r"^export (?=(async )?(function|const|class|let)\b)", re.M)

LOADER = """
const blob = async (src) => { const u = URL.createObjectURL(new Blob([src], { type: "text/javascript" })); try { return await import(u); } finally { URL.revokeObjectURL(u); } };
const unzip = async (v) => new Response(new Blob([v]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
const plotly = (v) => (globalThis.__cbvizPlotly ??= unzip(v)
  .then((s) => blob("const m={exports:{}};(function(module,exports,define){" + s + "\\n}).call(globalThis,m,m.exports,undefined);export default m.exports;"))
  .then((m) => m.default));
export default { async render({ model, el }) {
  const [P, A] = await Promise.all([plotly(model.get("plotly_gz")), blob(model.get("app_js"))]);
  return A.render({ model, el, Plotly: P });
} };
"""
"""The widget's `_esm`.

It must stay small: anywidget gives a module two seconds to load, and a big one on a busy page dies in
silence.
"""


def link(entry: str = "app.js", folder: Path = STATIC) -> str:
    """One module out of the plain ES modules in `folder`, in order of dependence: imports dropped (`as`
    becomes a const), exports made local, descriptions and types left out.

    All share one scope, so a name is defined once; `node --check` on the result finds a clash. Imports begin
    a line and name no default.
    """
    done: list[Path] = []
    out: list[str] = []

    def visit(path: Path) -> None:
        if path in done:
            return
        done.append(path)
        source = path.read_text("utf-8")
        aliases = ""
        for m in _IMPORT.finditer(source):
            visit((path.parent / m.group(2)).resolve())
            for item in m.group(1).split(","):
                if " as " in item:
                    old, new = item.split(" as ")
                    aliases += f"const {new.strip()} = {old.strip()};\n"
        code = _DESCRIPTION.sub("", _IMPORT.sub("", source))
        out.append(f"// --- {path.name}\n{aliases}{_EXPORT.sub('', code)}")

    visit((folder / entry).resolve())
    return "".join(out)


@functools.cache
def app_js() -> str:
    """The explorer's script: exports `render`."""
    return link("widget.js") + "\nexport { renderWidget as render };\n"


@functools.cache
def export_js() -> str:
    """The script of an exported page, which defines `boot`."""
    return link("export.js")


@functools.cache
def css() -> str:
    return (STATIC / "explorer.css").read_text("utf-8")


@functools.cache
def export_css() -> str:
    """What an exported page adds to `css`."""
    return (STATIC / "export.css").read_text("utf-8")


@functools.cache
def plotly_gz() -> bytes:
    """plotly.js of the installed plotly package, gzipped (1.5 MB)."""
    from plotly.offline import get_plotlyjs

    return gzip.compress(get_plotlyjs().encode(), 6)
