"""What the explorer's view "alone" is given: a request among others against the same request alone, as plain
JSON. Knows no page and no session.
"""

from __future__ import annotations

import math
from typing import Any

from cbviz.trace.alone import AgainstAlone


def alone_message(found: AgainstAlone) -> dict[str, Any]:
    """`apart` and `ulps` go layer by layer, a number a position, null where the cache no longer holds it;
    `chunks`: first position and step of each, 0 for a prefix hit.
    """

    def numbers(rows: Any) -> list[list[float | None]]:
        return [[None if math.isnan(x) else float(f"{x:.4g}") for x in row] for row in rows.tolist()]

    s = found.inside
    return {
        "type": "alone",
        "id": found.life.request_id,
        "equal": found.equal,
        "promised": found.promised,
        "sentences": found.sentences(),
        "num_prompt": found.life.num_prompt_tokens,
        "chunks": [
            [start, step] for (start, _), step in zip(found.life.cuts, found.life.origin, strict=True)
        ],
        "apart": numbers(found.apart),
        "ulps": numbers(found.ulps),
        "tokens": [
            {
                "position": t.position,
                "step": t.step,
                "apart": t.apart,
                "gap": t.gap,
                "changed": t.said != t.alone,
                "text": t.text,
                "text_alone": t.text_alone,
            }
            for t in found.tokens
        ],
        "step": found.step,
        "mates": found.mates,
        "rows": list(s.rows),
        "ops": [
            [d.layer, d.op, d.largest, round(d.ulps, 2), round(d.share, 4)]
            for d in [*(s.ops or s.keys_values), s.logits]
        ],
    }
