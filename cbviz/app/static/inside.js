// What ran inside the step at the cursor: its operators or kernels as lanes over the pass' time, and the longest of them by name. Measured, on demand.
import { h, setText, sync } from "./dom.js";
import { seconds, percent, nf } from "./format.js";
const LANE_PX = 22, MOST_NAMES = 12;
export class InsidePanel {
  constructor(host, app) {
    this.app = app; this.host = host; this.hit = [];
    this.note = h("p", { class: "cb-note cb-inside-note" }); this.button = h("button", { type: "button", class: "cb-btn cb-small cb-watch-inside", text: "Watch the next step", onclick: () => app.send("watch-inside") }); this.others = h("span", { class: "cb-inside-steps" });
    this.canvas = h("canvas", { class: "cb-lanes", role: "img" }); this.list = h("div", { class: "cb-inside-list" }); this.device = h("p", { class: "cb-note" });
    host.append(h("div", { class: "cb-inside-head" }, this.button, this.others), this.note, this.canvas, this.list, this.device);
    this.canvas.addEventListener("mousemove", (e) => { const s = this.hit.find((q) => e.offsetX >= q.a && e.offsetX < q.b && e.offsetY >= q.y && e.offsetY < q.y + LANE_PX); this.canvas.title = s ? `${s.name}: ${seconds(s.d)}, from ${seconds(s.t)}` : ""; });
    this.ro = new ResizeObserver(() => { this.last = null; if (!this.host.hidden && this.app.R) this.draw(); }); this.ro.observe(host);
  }
  draw() {
    const a = this.app.inside, { R, th, live } = this.app; if (this.host.hidden || !R) return; this.button.hidden = !live.can_watch; this.button.disabled = !!live.loading;
    const p = a && a.step === R.step ? a.profile : null; if (a === this.last && th === this.theme && this.button.hidden === this.was) return; this.last = a; this.theme = th; this.was = this.button.hidden;
    const watched = (a && a.watched) || []; sync(this.others, watched.slice(-8), (n) => n, (n) => h("button", { type: "button", class: "cb-btn cb-small", text: `step ${nf.format(n)}`, title: `Step ${n} was watched: show it`, onclick: () => this.app.seek(n) }), (n, k) => n.classList.toggle("cb-now", k === R.step));
    setText(this.note, p ? `${seconds(p.total)} measured by ${p.source}. ${p.lanes.map((x, i) => (p.lanes.length > 1 ? `${i + 1}: ` : "") + x).join("; ")}.` : watched.length ? "This step was not watched." : live.can_watch ? "Which operators or kernels does a step consist of, and which takes the time? Watch one." : live.recording ? "No step of this recording was watched from inside." : "Nothing is computed here that could be watched: choose the real model under Setup.");
    setText(this.device, (a && a.step === R.step && a.device.join(". ")) || ""); this.canvas.hidden = !p; this.hit = []; if (!p) { sync(this.list, [], (x) => x); return; }
    const w = this.canvas.parentElement.clientWidth - 20, dpr = devicePixelRatio || 1, H = p.lanes.length * (LANE_PX + 4), c = this.canvas; c.style.width = w + "px"; c.style.height = H + "px"; c.width = Math.round(w * dpr); c.height = Math.round(H * dpr); const x = c.getContext("2d"); x.scale(dpr, dpr); x.clearRect(0, 0, w, H); x.font = `600 10px ${th.font}`; x.textBaseline = "middle"; x.textAlign = "left";
    const end = Math.max(p.total, ...p.start.map((t, i) => t + p.duration[i])), k = w / end; x.fillStyle = th.track; p.lanes.forEach((_, i) => x.fillRect(0, i * (LANE_PX + 4), w, LANE_PX));
    p.name.forEach((n, i) => { const xa = p.start[i] * k, xb = Math.max(xa + 0.5, (p.start[i] + p.duration[i]) * k), y = p.lane[i] * (LANE_PX + 4); x.fillStyle = th.own.css[n & 255]; x.fillRect(xa, y, xb - xa - (xb - xa > 3 ? 0.5 : 0), LANE_PX); if (xb - xa > 34) { x.fillStyle = th.own.ink[n & 255]; x.save(); x.beginPath(); x.rect(xa, y, xb - xa - 2, LANE_PX); x.clip(); x.fillText(p.names[n], xa + 3, y + LANE_PX / 2); x.restore(); } this.hit.push({ a: xa, b: Math.max(xb, xa + 2), y, name: p.names[n], t: p.start[i], d: p.duration[i] }); });
    const sums = new Map(); p.name.forEach((n, i) => { const s = sums.get(n) || [n, 0, 0]; s[1]++; s[2] += p.duration[i]; sums.set(n, s); }); const rows = [...sums.values()].sort((a, b) => b[2] - a[2]), all = rows.reduce((s, r) => s + r[2], 0); c.setAttribute("aria-label", `Inside step ${R.step}: ` + rows.slice(0, 4).map((r) => `${p.names[r[0]]} ${percent(r[2] / all)}`).join(", "));
    sync(this.list, rows.slice(0, MOST_NAMES).map((r) => [p.names[r[0]], ...r]), (r) => r[0], (r) => h("div", { class: "cb-inside-row" }, h("i", { "aria-hidden": "true" }), h("span", { text: r[0] }), h("b"), h("em")), (n, r) => { n.firstChild.style.background = th.own.css[r[1] & 255]; setText(n.childNodes[2], `${seconds(r[3])}`); setText(n.childNodes[3], `${percent(r[3] / all)}, ${nf.format(r[2])} ×`); });
  }
  destroy() { this.ro.disconnect(); }
}
