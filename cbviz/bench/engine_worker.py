"""Other engines behind pipes, on the same weights and requests: vLLM or llama.cpp.

Run by the Python that has the engine, which need not have cbviz: this file imports nothing of it. The first
argument names the engine, `vllm` or `llama`. Reads one JSON object a line from stdin and answers each with
one on the real stdout (whatever else is printed goes to stderr):

    {"op": "hello"}                                                    -> {"version": text}
    {"op": "load", "model": path, "threads": n, "seats": s, "room": r} -> {}: a folder for vLLM (float32), a
    GGUF file for llama.cpp; r tokens a request
    {"op": "run", "requests": [[prompt ids, output tokens], ...], "seats": s}
                                                                       -> {"seconds": wall time, "tokens":
                                                                       output tokens}; greedy, end of sequence
                                                                       ignored

    {"op": "decode", "prompts": [ids, ...], "steps": k}                -> {"seconds": [...]}: llama.cpp alone; the prompts together, then k steps of one token each,
                                                                          the time of the decode call until
                                                                          its logits are there, no choice of
                                                                          tokens

An exception is answered with {"error": text}.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from time import perf_counter
from typing import Any, Protocol

if __package__:
    from cbviz.bench.pipe import serve
else:  # run as a script, by a Python that need not have cbviz: its own folder is where Python looks first
    from pipe import serve  # type: ignore[import-not-found, no-redef]

    sys.path.pop(0)  # this folder has a `kernels`, which transformers would take for the package of that name

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
Requests = list[list[Any]]


class Peer(Protocol):
    version: str

    def load(self, model: str, threads: int, seats: int, room: int) -> None: ...
    def run(self, requests: Requests, seats: int) -> int: ...


class Vllm:
    """vLLM in this process, float32, eager, its own continuous batching."""

    def __init__(self) -> None:
        import vllm

        self._vllm = vllm
        self.version = f"vLLM {vllm.__version__}"
        self._engines: dict[int, Any] = {}

    def load(self, model: str, threads: int, seats: int, room: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._arguments: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": room,
            "enable_prefix_caching": False,
            "max_num_seqs": seats,
        }
        self._engine = self._vllm.LLM(**self._arguments)

    def run(self, requests: Requests, seats: int) -> int:
        # All are there at the start; vLLM runs as many as it was given seats.
        if self._arguments["max_num_seqs"] != seats and len(requests) > seats:
            raise ValueError(f"vLLM was loaded with {self._arguments['max_num_seqs']} seats")
        params = [
            self._vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in requests
        ]
        outputs = self._engine.generate(
            [{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False
        )
        return sum(len(o.outputs[0].token_ids) for o in outputs)


class Llama:
    """llama.cpp through llama-cpp-python's low-level calls, with the plainest continuous batching: a free
    seat takes the next request, its prompt goes in whole.
    """

    def __init__(self) -> None:
        import llama_cpp

        self._l = llama_cpp
        self.version = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))

    def load(self, model: str, threads: int, seats: int, room: int) -> None:
        c = self._l
        self._model = c.llama_model_load_from_file(model.encode(), c.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        p = c.llama_context_default_params()
        p.n_ctx = p.n_batch = p.n_ubatch = seats * room
        p.n_seq_max, p.n_threads, p.n_threads_batch = seats, threads, threads
        if hasattr(p, "kv_unified"):
            p.kv_unified = True
        self._context = c.llama_init_from_model(self._model, p)
        if not self._context:
            raise ValueError("llama.cpp makes no context of this size")
        self._vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(seats * room, 0, 1)

    def run(self, requests: Requests, seats: int) -> int:
        import numpy as np

        c, b = self._l, self._batch
        memory = c.llama_get_memory(self._context)
        c.llama_memory_clear(memory, True)
        waiting, produced = list(requests), 0
        running: dict[int, list[Any]] = {}  # seat: next ids, position, still to come
        free = list(range(seats))
        while waiting or running:
            while waiting and free:
                ids, n = waiting.pop(0)
                running[free.pop()] = [ids, 0, n]
            b.n_tokens, rows = 0, []
            for seat, (ids, position, _) in running.items():
                for j, token in enumerate(ids):
                    i = b.n_tokens
                    b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = (
                        token,
                        position + j,
                        1,
                        j == len(ids) - 1,
                    )
                    b.seq_id[i][0] = seat
                    b.n_tokens += 1
                rows.append((seat, b.n_tokens - 1))
            if c.llama_decode(self._context, b):
                raise ValueError("llama_decode failed")
            for seat, i in rows:
                logits = np.ctypeslib.as_array(c.llama_get_logits_ith(self._context, i), shape=(self._vocab,))
                state = running[seat]
                state[1] += len(state[0])
                state[0] = [int(logits.argmax())]
                state[2] -= 1
                produced += 1
                if not state[2]:
                    c.llama_memory_seq_rm(memory, seat, -1, -1)
                    del running[seat]
                    free.append(seat)
        return produced

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        import numpy as np

        c, b = self._l, self._batch
        c.llama_memory_clear(c.llama_get_memory(self._context), True)
        inputs, at = [list(p) for p in prompts], [0] * len(prompts)
        seconds = []
        for _ in range(steps + 1):
            b.n_tokens, rows = 0, []
            for seat, ids in enumerate(inputs):
                for j, token in enumerate(ids):
                    i = b.n_tokens
                    b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = (
                        token,
                        at[seat] + j,
                        1,
                        j == len(ids) - 1,
                    )
                    b.seq_id[i][0] = seat
                    b.n_tokens += 1
                rows.append(b.n_tokens - 1)
            t0 = perf_counter()
            if c.llama_decode(self._context, b):
                raise ValueError("llama_decode failed")
            pointers = [c.llama_get_logits_ith(self._context, i) for i in rows]  # waits until they are there
            seconds.append(perf_counter() - t0)
            for seat, p in enumerate(pointers):
                at[seat] += len(inputs[seat])
                inputs[seat] = [int(np.ctypeslib.as_array(p, shape=(self._vocab,)).argmax())]
        return seconds[1:]


def main() -> None:
    kind = sys.argv[1]
    os.environ.update(QUIET)
    if kind == "vllm" and "LD_PRELOAD" not in os.environ:
        # vLLM's CPU build wants Intel's OpenMP loaded first; without it its threads spin against one another.
        if found := glob.glob(os.path.join(sys.prefix, "lib*", "**", "libiomp5.so"), recursive=True):
            os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": found[0]})
    peer: Peer | None = None

    def answer(m: dict[str, Any]) -> dict[str, Any]:
        nonlocal peer
        peer = peer or (Vllm() if kind == "vllm" else Llama())
        if m["op"] == "hello":
            return {"version": peer.version}
        if m["op"] == "load":
            peer.load(m["model"], m["threads"], m["seats"], m["room"])
            return {}
        if m["op"] == "run":
            t0 = perf_counter()
            count = peer.run(m["requests"], m["seats"])
            return {"seconds": perf_counter() - t0, "tokens": count}
        if m["op"] == "decode" and isinstance(peer, Llama):
            return {"seconds": peer.decode(m["prompts"], m["steps"])}
        return {"error": f"unknown op {m['op']!r}"}

    serve(answer)


if __name__ == "__main__":
    main()
