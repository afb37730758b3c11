// Colours can be told apart and words on them can be read, in both themes.
import test from "node:test";
import assert from "node:assert/strict";
import { STATES, THEMES, contrast, lightness, ownerPalette } from "../../cbviz/app/static/color.js";

const READABLE = 4.5;

test("there are as many states as the trace has", () => assert.equal(STATES.length, 15));

for (const [name, theme] of Object.entries(THEMES)) {
  test(`${name}: the number on a block can be read, for 256 owners`, () => {
    const { css, ink } = ownerPalette(theme);

    css.forEach((color, owner) => {
      const found = contrast(color, ink[owner]);
      assert.ok(found >= READABLE, `owner ${owner}: ${found}`);
    });
  });

  test(`${name}: words can be read on every ground they stand on`, () => {
    const pairs = [
      [theme.accent, theme.bg],
      [theme.bad, theme.bg],
      [theme.onAccent, theme.accent],
      [theme.fg, theme.hot],
    ];
    for (const ground of [theme.bg, theme.page, theme.track]) {
      pairs.push([theme.fg, ground], [theme.mute, ground]);
    }

    for (const [ink, ground] of pairs) {
      assert.ok(contrast(ink, ground) >= READABLE, `${ink} on ${ground}: ${contrast(ink, ground)}`);
    }
  });

  test(`${name}: states that mean trouble differ in lightness or texture from those that don't`, () => {
    const light = (state) => lightness(theme.state[state][0]);
    const texture = (state) => lightness(theme.state[state][1]);

    assert.ok(Math.abs(light("prefill") - light("decode")) > 12);
    assert.ok(Math.abs(light("waiting") - light("decode")) > 12);
    for (const state of ["preempted", "swapped", "held", "padded", "recompute", "aborted"]) {
      assert.ok(Math.abs(texture(state) - light(state)) > 20, `${state}: both colours of its texture`);
    }
  });
}
