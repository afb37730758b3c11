"""Texts that a page must show as they are: markup, ends of scripts, line separators, marks that turn the
reading direction, words without an end.
"""

from __future__ import annotations

from typing import Any

OWN = "globalThis.owned = true"
TEXTS = {
    "markup": f'<img src=x onerror="{OWN}"><b>bold</b>',
    "script": f"</script><script>{OWN}</script><!--",
    "link": f'<a href="javascript:{OWN}">x</a>',
    "quotes": f"\" onmouseover='{OWN}' x='`${{{OWN}}}`",
    "separators": "one\u2028two\u2029three\x85four",
    "nul": "a\x00b\x07c",
    "turned": "\u202eabc\u202d \u2067def \u05e9\u05dc\u05d5\u05dd",
    "arabic": "\u0645\u0631\u062d\u0628\u0627 12 \u0628\u0643 (x)",
    "word": "w" * 600,
    "marks": "Z" + "\u0300\u0301\u0310" * 60,
    "formula": "$x^2$ & &lt;",
}
"""By what is hostile in them."""

WATCH = """(() => {
  globalThis.broken = [];
  document.addEventListener("securitypolicyviolation", (e) => globalThis.broken.push(`${e.violatedDirective} ${e.blockedURI} ${e.sample}`));
})()"""
"""Run before a page's own scripts: notes what the page's policy forbids."""


def assert_harmless(page: Any) -> None:
    """Nothing of a text ran, nothing became an element, and nothing is wider than the window."""
    assert page.evaluate("globalThis.owned") is None
    assert page.evaluate("globalThis.broken") == []
    assert (
        page.evaluate(
            "document.querySelectorAll('.cb-root img, .cb-root b b, .cb-root a[href^=javascript], .cb-root "
            "script').length"
        )
        == 0
    )
    wide = page.evaluate("""[...document.querySelectorAll('.cb-root *')].filter((e) => {
      const r = e.getBoundingClientRect();
      const clipped = e.closest('.cb-sr, .cb-body, .cb-subtitle, .cb-what, .cb-legend, .cb-chip, .cb-phead, .cb-status, svg');
      return r.width && r.right > innerWidth + 1 && !clipped;
    }).map((e) => e.className + ' ' + e.textContent.slice(0, 40))""")
    assert wide == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    too_wide = page.evaluate(
        "[...document.querySelectorAll('.cb-body')].filter((e) => e.scrollWidth > e.clientWidth + "
        "1).map((e) => e.parentNode.className)"
    )
    assert too_wide == []
