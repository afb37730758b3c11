"""Settings that let a pool hold more."""

from __future__ import annotations

import random
from typing import Any

from cbviz import events as ev
from cbviz.config import EngineConfig
from cbviz.cost import models
from cbviz.lessons.grading import Part, ask, must_be_function, told
from cbviz.lessons.tasks.common import Tally, make_spec
from cbviz.session import Session
from cbviz.specs import ModelSpec
from cbviz.trace.trace import Cursor


class FillThePool:
    """Bytes of a token, blocks in a memory, blocks under a window."""

    name = "fill-the-pool"
    title = "How much fits, and how much is held?"
    question = """Write a function of one case that returns a dict. A case is a dict:
  layers, kv_heads, head_dim   the model's cache: keys and values, a number for each of head_dim, in each head of each layer
  bits          of one such number in the cache
  scale_bytes   beside them, for the keys of a token in one head, and as many for its values (0: none)
  block_size    tokens of a block
  memory        bytes for the whole pool, the null block included
  computed      tokens of a request whose keys and values have been computed
  window        a token sees itself and the window - 1 before it; 0: all
The answer:
  block_bytes   bytes of one block
  blocks        blocks that can be given out
  held          blocks that the request holds while the last of these tokens is computed: those that lie wholly left of what it sees have been given back"""
    hints = (
        (
            "A token: layers x 2 (keys and values) x kv_heads x (head_dim x bits / 8 + scale_bytes). A "
            "block: "
            "block_size times that."
        ),
        "memory // block_bytes blocks, of which block 0 stands for nothing and is never given out.",
        (
            "The last token, at position computed - 1, sees back to position computed - window. Blocks that "
            "end before it are gone; the last block may be partly empty."
        ),
    )

    def _cases(self, seed: int) -> list[dict[str, int]]:
        rng = random.Random(seed)
        cases = []
        for i in range(14):
            bits, scale = rng.choice(((32, 0), (16, 0), (8, 4), (4, 8)))
            size, heads, dim, layers = (
                rng.choice((4, 8, 16)),
                rng.choice((1, 2, 3, 8)),
                rng.choice((32, 64, 128)),
                rng.choice((2, 12, 30)),
            )
            case = {
                "layers": layers,
                "kv_heads": heads,
                "head_dim": dim,
                "bits": bits,
                "scale_bytes": scale,
                "block_size": size,
            }
            n = rng.randint(2 * size, 90)
            window = rng.randint(2, 3 * size) if i % 3 else 0
            if i % 2 and window:  # at the edge: the last seen position begins a block, or ends one
                n += (window + rng.choice((0, 1)) - n) % size
            cases.append(
                {
                    **case,
                    "memory": self._block_bytes(case) * rng.randint(20, 400)
                    + rng.randrange(self._block_bytes(case)),
                    "computed": n,
                    "window": window,
                }
            )
        return cases

    def _block_bytes(self, c: dict[str, int]) -> int:
        each = c["bits"] / 8 + c["scale_bytes"] / c["head_dim"]
        spec = ModelSpec(
            "case",
            c["layers"],
            64,
            c["kv_heads"],
            c["kv_heads"],
            c["head_dim"],
            64,
            1000,
            4096,
            kv_bytes_per_element=each,
        )
        return round(models.kv_bytes_per_token(spec)) * c["block_size"]

    def _truth(self, c: dict[str, int]) -> dict[str, int]:
        size = self._block_bytes(c)
        one = make_spec("r1", random.Random(0), c["computed"] - 1, 2)
        s = Session(
            [one],
            runner="sim",
            discipline="vllm",
            num_blocks=200,
            block_size=c["block_size"],
            sliding_window=c["window"],
            enable_prefix_caching=False,
        )
        s.run(max_steps=2)
        record = s.trace.record(2)
        at = next(i for i, e in enumerate(record.events) if isinstance(e, ev.Executed))
        return {
            "block_bytes": size,
            "blocks": EngineConfig(num_blocks=c["memory"] // size).num_usable_blocks,
            "held": sum(b != 0 for b in s.trace.state(Cursor(2, at)).request("r1").block_ids),
        }

    def sample(self, seed: int) -> str:
        case = self._cases(seed)[1]
        return f"A case:\n{told(case)}\nThe engine says: {self._truth(case)}"

    def grade(self, answer: Any, seed: int) -> list[Part]:
        must_be_function(answer, "one case")
        tallies = {
            "block_bytes": Tally("block_bytes", 30),
            "blocks": Tally("blocks", 20),
            "held": Tally("held", 50),
        }
        for case in self._cases(seed):
            truth = self._truth(case)
            got, fault = ask(answer, case)
            for key, tally in tallies.items():
                tally.add(case, truth[key], got.get(key) if isinstance(got, dict) else None, fault)
        return [t.part() for t in tallies.values()]
