"""Where the numbers of a request among others differ from those of the same request alone: a map of layers
and positions.
"""

from __future__ import annotations

import numpy as np

from cbviz.trace.alone import AgainstAlone
from cbviz.views.figure import Figure, layout, plain
from cbviz.views.theme import theme


def alone_rows(found: AgainstAlone) -> np.ndarray:
    """[layers, positions]: log2 of the difference in units in the last place, -6 where there is none (no
    difference is that small but 0), NaN where it is not known.
    """
    with np.errstate(divide="ignore"):
        return np.where(found.ulps == 0, -6.0, np.maximum(np.log2(found.ulps), -5.0))


def alone(found: AgainstAlone, *, dark: bool = False) -> Figure:
    """Keys and values in the cache, layer by position: what `Session.alone` found.

    Two traces: the map, and the tokens that alone would be others (marked above it).
    """
    t = theme(dark)
    rows, life = alone_rows(found), found.life
    said = {x.position: x for x in found.tokens}
    text = [
        [
            "no longer in the cache"
            if np.isnan(u)
            else "equal, bit for bit"
            if u == 0
            else f"differs by up to {a:.2g}, {u:.2g} units in the last place"
            for a, u in zip(x, y)
        ]
        for x, y in zip(found.apart, found.ulps)
    ]
    ticks = [-6, -4, -2, 0, 2, 4]
    heat = {
        "type": "heatmap",
        "z": [[None if np.isnan(v) else round(float(v), 2) for v in row] for row in rows],
        "text": text,
        "zmin": -6,
        "zmax": 4,
        "xgap": 1,
        "colorscale": [[0, t.bg], [0.099, t.bg], [0.1, t.line], [1, t.accent]],
        "hovertemplate": "layer %{y}, position %{x}: %{text}<extra></extra>",
        "colorbar": {
            "title": {"text": "units in the<br>last place"},
            "thickness": 12,
            "outlinecolor": t.line,
            "tickvals": ticks,
            "ticktext": ["equal", "1/16", "1/4", "1", "4", "16"],
        },
    }
    others = found.changed
    marks = {
        "type": "scatter",
        "mode": "markers",
        "x": [x.position - 1 for x in others],
        "y": [-1.2] * len(others),
        "marker": {"symbol": "x", "size": 9, "color": t.accent},
        "text": [f"alone the next token is “{plain(x.text_alone)}”, not “{plain(x.text)}”" for x in others],
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }
    line = {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": life.num_prompt_tokens - 0.5,
        "x1": life.num_prompt_tokens - 0.5,
        "y0": 0,
        "y1": 1,
        "line": {"color": t.fg, "width": 1, "dash": "dot"},
    }
    head = f"{plain(life.request_id)} among others against alone: " + (
        "equal, bit for bit" if found.equal else f"{len(others)} of {len(said)} tokens would change"
    )
    return {
        "data": [heat, marks],
        "layout": layout(
            t,
            head,
            x="position (the dotted line: where the output begins)",
            y="layer",
            height=340,
            shapes=[line],
            yaxis={"autorange": "reversed", "showgrid": False},
            xaxis={"showgrid": False},
        ),
    }
