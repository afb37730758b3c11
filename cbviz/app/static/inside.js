// What ran inside the step at the cursor: its copies of blocks beside its pass (any step that has some), and where it was watched its operators or kernels as lanes over the pass' time, and the longest of them by name.
import { h, setText, sync } from "./dom.js";
import { seconds, percent, plural, nf } from "./format.js";
const LANE_PX = 22;
const MOST_NAMES = 12;
const LANES = {
  pass: "the pass",
  "swap-out": "swap-out: device to host",
  "swap-in": "swap-in: host to device",
  copy: "copy on the device",
};
// A step's spans as a profile's lanes: the pass above, below it each kind of copy, on one axis of time.
export function moves(m) {
  const kinds = Object.keys(LANES).filter((k) => m.spans.some((s) => s[0] === k));
  const name = m.spans.map((s) => kinds.indexOf(s[0]));
  return {
    names: kinds.map((k) => LANES[k]),
    lanes: kinds.map((k) => LANES[k]),
    name,
    lane: name,
    start: m.spans.map((s) => s[1]),
    duration: m.spans.map((s) => s[2] - s[1]),
    total: Math.max(...m.spans.map((s) => s[2])),
    note: m.spans.map((s) => (s[3] ? `, ${plural(s[3], "block")}` : "") + ` (${m.clock})`),
  };
}
export class InsidePanel {
  constructor(host, app) {
    this.app = app;
    this.host = host;
    this.hit = [];
    this.note = h("p", { class: "cb-note cb-inside-note" });
    this.button = h("button", {
      type: "button",
      class: "cb-btn cb-small cb-watch-inside",
      text: "Watch the next step",
      onclick: () => app.send("watch-inside"),
    });
    this.others = h("span", { class: "cb-inside-steps" });
    this.kind = h("span", { class: "cb-note", text: "measured", hidden: true });
    this.canvas = h("canvas", { class: "cb-lanes", role: "img" });
    this.list = h("div", { class: "cb-inside-list" });
    this.device = h("p", { class: "cb-note" });
    this.strip = h("canvas", { class: "cb-moves", role: "img", hidden: true });
    this.copied = h("p", { class: "cb-note cb-moved", hidden: true });
    this.moved = [];
    host.append(
      h("div", { class: "cb-inside-head" }, this.button, this.others, this.kind),
      this.copied,
      this.strip,
      this.note,
      this.canvas,
      this.list,
      this.device,
    );
    for (const [c, hits] of [
      [this.canvas, () => this.hit],
      [this.strip, () => this.moved],
    ]) {
      c.addEventListener("mousemove", (e) => {
        const s = hits().find(
          (q) => e.offsetX >= q.a && e.offsetX < q.b && e.offsetY >= q.y && e.offsetY < q.y + LANE_PX,
        );
        c.title = s ? `${s.name}: ${seconds(s.d)}, from ${seconds(s.t)}${s.more}` : "";
      });
    }
    this.ro = new ResizeObserver(() => {
      this.last = null;
      if (!this.host.hidden && this.app.R) this.draw();
    });
    this.ro.observe(host);
  }
  draw() {
    const a = this.app.inside;
    const { R, th, live } = this.app;
    if (this.host.hidden || !R) return;
    this.button.hidden = !live.can_watch;
    this.button.disabled = !!live.loading;
    const now = a && a.step === R.step ? a : null;
    const m = now && now.moved;
    const p = now ? now.profile : null;
    if (a === this.last && th === this.theme && this.button.hidden === this.was) return;
    this.last = a;
    this.theme = th;
    this.was = this.button.hidden;
    const watched = (a && a.watched) || [];
    sync(
      this.others,
      watched.slice(-8),
      (n) => n,
      (n) =>
        h("button", {
          type: "button",
          class: "cb-btn cb-small",
          text: `step ${nf.format(n)}`,
          title: `Step ${n} was watched: show it`,
          onclick: () => this.app.seek(n),
        }),
      (n, k) => n.classList.toggle("cb-now", k === R.step),
    );
    setText(
      this.note,
      p
        ? `${seconds(p.total)} measured by ${p.source}. ${p.lanes.map((x, i) => (p.lanes.length > 1 ? `${i + 1}: ` : "") + x).join("; ")}.`
        : watched.length
          ? "This step was not watched."
          : live.can_watch
            ? "Which operators or kernels does a step consist of, and which takes the time? Watch one."
            : live.recording
              ? "No step of this recording was watched from inside."
              : "Nothing is computed here that could be watched: choose the real model under Setup.",
    );
    this.kind.hidden = !p;
    this.note.classList.toggle("cb-after", !!p);
    setText(this.copied, m ? m.said : "");
    this.copied.hidden = !m;
    this.strip.hidden = !m;
    this.moved = [];
    if (m) this.lanes(this.strip, moves(m), this.moved, `Step ${R.step}. ${m.said}`);
    setText(this.device, (a && a.step === R.step && a.device.join(". ")) || "");
    this.canvas.hidden = !p;
    this.hit = [];
    if (!p) {
      sync(this.list, [], (x) => x);
      return;
    }
    this.lanes(this.canvas, p, this.hit, "");
    const sums = new Map();
    p.name.forEach((n, i) => {
      const s = sums.get(n) || [n, 0, 0];
      s[1]++;
      s[2] += p.duration[i];
      sums.set(n, s);
    });
    const rows = [...sums.values()].sort((a, b) => b[2] - a[2]);
    const all = rows.reduce((s, r) => s + r[2], 0);
    this.canvas.setAttribute(
      "aria-label",
      `Inside step ${R.step}: ` +
        rows
          .slice(0, 4)
          .map((r) => `${p.names[r[0]]} ${percent(r[2] / all)}`)
          .join(", "),
    );
    sync(
      this.list,
      rows.slice(0, MOST_NAMES).map((r) => [p.names[r[0]], ...r]),
      (r) => r[0],
      (r) =>
        h(
          "div",
          { class: "cb-inside-row" },
          h("i", { "aria-hidden": "true" }),
          h("span", { text: r[0], title: r[0] }),
          h("b"),
          h("em"),
        ),
      (n, r) => {
        n.firstChild.style.background = th.own.css[r[1] & 255];
        setText(n.childNodes[2], `${seconds(r[3])}`);
        setText(n.childNodes[3], `${percent(r[3] / all)}, ${nf.format(r[2])} ×`);
      },
    );
  }
  lanes(c, p, hit, label) {
    const { th } = this.app;
    const w = c.parentElement.clientWidth - 20;
    const dpr = devicePixelRatio || 1;
    const H = p.lanes.length * (LANE_PX + 4);
    c.style.width = w + "px";
    c.style.height = H + "px";
    c.width = Math.round(w * dpr);
    c.height = Math.round(H * dpr);
    const x = c.getContext("2d");
    x.scale(dpr, dpr);
    x.clearRect(0, 0, w, H);
    x.font = `600 10px ${th.font}`;
    x.textBaseline = "middle";
    x.textAlign = "left";
    const end = Math.max(p.total, ...p.start.map((t, i) => t + p.duration[i]));
    const k = w / end;
    x.fillStyle = th.track;
    p.lanes.forEach((_, i) => x.fillRect(0, i * (LANE_PX + 4), w, LANE_PX));
    p.name.forEach((n, i) => {
      const xa = p.start[i] * k;
      const xb = Math.max(xa + 0.5, (p.start[i] + p.duration[i]) * k);
      const y = p.lane[i] * (LANE_PX + 4);
      x.fillStyle = th.own.css[n & 255];
      x.fillRect(xa, y, xb - xa - (xb - xa > 3 ? 0.5 : 0), LANE_PX);
      if (xb - xa > (p.note ? x.measureText(p.names[n]).width + 8 : 34)) {
        x.fillStyle = th.own.ink[n & 255];
        x.save();
        x.beginPath();
        x.rect(xa, y, xb - xa - 2, LANE_PX);
        x.clip();
        x.fillText(p.names[n], xa + 3, y + LANE_PX / 2);
        x.restore();
      }
      hit.push({
        lane: p.lane[i],
        a: xa,
        b: Math.max(xb, xa + 2),
        y,
        name: p.names[n],
        t: p.start[i],
        d: p.duration[i],
        more: p.note ? p.note[i] : "",
      });
    });
    if (label) {
      c.setAttribute("aria-label", label);
      x.fillStyle = th.mute;
      p.lanes.forEach((name, i) => {
        const mine = hit.filter((q) => q.lane === i);
        const a = Math.min(...mine.map((q) => q.a));
        const b = Math.max(...mine.map((q) => q.b));
        const wide = x.measureText(name).width + 8;
        if (mine.some((q) => q.b - q.a > wide)) return;
        x.fillText(name, b + wide < w ? b + 4 : Math.max(3, a - wide + 4), i * (LANE_PX + 4) + LANE_PX / 2);
      });
    } // a bar too short for its name has it beside it
  }
  destroy() {
    this.ro.disconnect();
  }
}
