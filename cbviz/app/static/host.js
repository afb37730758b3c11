// The host's blocks under the block map: who waits there, with how many blocks. Hidden where nobody can be swapped out and nobody is.
import { h } from "./dom.js";
import { plural } from "./format.js";
const HOST_CELLS = 24;
export class HostStrip {
  constructor(host, app) {
    this.app = app;
    this.el = host;
    this.last = "";
  }
  away() {
    const { R } = this.app;
    return R.waiting.map((r) => ({ r, n: R.rows[r] ? R.rows[r].host : 0 })).filter((x) => x.n);
  }
  draw() {
    const { R, th } = this.app;
    const total = R.config.swap_blocks || 0;
    const away = this.away();
    const used = away.reduce((a, x) => a + x.n, 0);
    const key = [total, th.dark, ...away.map((x) => x.r + "x" + x.n)].join();
    if (key === this.last) return;
    this.last = key;
    this.el.hidden = !total && !used;
    if (this.el.hidden) return;
    this.el.replaceChildren(
      h(
        "span",
        {
          class: "cb-hosthead",
          title:
            "Host memory: a preempted request's blocks wait here and are copied back, instead of being computed again",
        },
        h("b", { text: "Host" }),
        ` ${used} of ${plural(total || used, "block")}`,
      ),
      ...away.map(({ r, n }) => {
        const cells = Array.from({ length: Math.min(n, HOST_CELLS) }, () => {
          const i = h("i", { class: "cb-hostcell", "aria-hidden": "true" });
          i.style.background = `repeating-linear-gradient(0deg, transparent 0 2px, ${th.bg} 2px 3px), ${th.own.css[r & 255]}`;
          return i;
        });
        const b = h(
          "button",
          {
            type: "button",
            class: "cb-hostreq",
            title: `${R.name(r)} is swapped out: ${plural(n, "block")} on the host, ${plural(R.rows[r].computed, "token")} that need no computing. It comes back when ${plural(n, "block")} are free at once.`,
          },
          h("b", { dir: "auto", text: R.id(r) }),
          ...cells,
          n > HOST_CELLS ? ` … ${n}` : ` ${n}`,
        );
        b.addEventListener("click", () => this.app.select(r));
        return b;
      }),
    );
  }
}
