"""Painted frames a second of the explorer under Voilà, with 256 requests and 4,096 blocks played at full
speed: `python tests/browser/bench_frames.py`.

Prints one JSON line. A frame counts when the timeline or the block map was repainted. Browser, server and
kernel share this machine, and what else runs on it is reported: figures from a busy machine say little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from cbviz.app import serve

NOTEBOOK = """
import random
import cbviz as cb
rng = random.Random(0)
prompts = [tuple(rng.randrange(256, 40000) for _ in range(rng.randint(40, 400))) for _ in range({requests})]
specs = [cb.RequestSpec(f"r{{i + 1}}", p, 2000, arrival_step=1 + i // 4, output_len=rng.randint(200, 600)) for i, p in enumerate(prompts)]
s = cb.Session(specs, runner="sim", discipline="chunked", max_num_seqs={requests}, num_blocks={blocks}, block_size=16, max_num_batched_tokens=1024)
cb.explorer(s)
"""


def foreign_cores(mine: set[int], seconds: float) -> float:
    """Cores that processes other than `mine` used during `seconds`."""

    def used() -> dict[int, float]:
        out = {}
        for p in psutil.process_iter(["pid", "cpu_times"]):
            if p.info["cpu_times"] is not None and p.pid not in mine:
                out[p.pid] = p.info["cpu_times"].user + p.info["cpu_times"].system
        return out

    before = used()
    time.sleep(seconds)
    after = used()
    return sum(after[p] - before.get(p, 0.0) for p in after) / seconds


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--requests", type=int, default=256)
    args.add_argument("--blocks", type=int, default=4096)
    args.add_argument("--seconds", type=float, default=5.0)
    args.add_argument("--speed", default="0", help="steps a second; 0: full speed")
    a = args.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as pw:
        page_file = Path(folder) / "explorer.ipynb"
        nb = json.loads((serve.notebooks() / "explorer.ipynb").read_text("utf-8"))
        nb["cells"][0]["source"] = NOTEBOOK.format(requests=a.requests, blocks=a.blocks)
        page_file.write_text(json.dumps(nb), "utf-8")
        port = serve.free_port("127.0.0.1", random.randint(18100, 28000))
        url = f"http://127.0.0.1:{port}/"
        command = serve.explore_command(page_file, "127.0.0.1", port)
        server = subprocess.Popen(
            command,
            env=serve.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            assert serve.wait_until_up(url, server)
            browser = pw.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 800}, bypass_csp=True)
            page.goto(url)
            page.wait_for_function("globalThis.cbviz && cbviz.state() && cbviz.frames() > 0", timeout=60_000)
            page.select_option(".cb-speed", a.speed)
            page.click(".cb-play")
            page.wait_for_function(
                f"cbviz.state().step > {a.requests // 4 + 20}", timeout=60_000
            )  # all have arrived
            start = page.evaluate(
                "({ frames: cbviz.frames(), step: cbviz.app.run.step, t: performance.now(), playing: "
                "cbviz.app.live.playing })"
            )
            me = psutil.Process()
            mine = {os.getpid(), *(p.pid for p in me.children(recursive=True))}
            foreign = foreign_cores(mine, a.seconds)
            end = page.evaluate(
                "({ frames: cbviz.frames(), step: cbviz.app.run.step, t: performance.now(), playing: "
                "cbviz.app.live.playing })"
            )
            s = (end["t"] - start["t"]) / 1e3
            frames, steps = (round((end[k] - start[k]) / s, 1) for k in ("frames", "step"))
            print(
                json.dumps(
                    {
                        "requests": a.requests,
                        "blocks": a.blocks,
                        "painted_frames_s": frames,
                        "steps_s": steps,
                        "seconds": round(s, 2),
                        "still_playing": end["playing"],
                        "foreign_cores": round(foreign, 2),
                    }
                )
            )
            browser.close()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(10)


if __name__ == "__main__":
    main()
