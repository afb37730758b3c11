"""The real model: weights, tokenizer, decoder and paged KV tensors.

Importing this package loads no torch; its modules `loader`, `decoder`, `ops`, `cpu_ops`, `kv_store`,
`sampling` and `threads` do. Nothing here knows requests, queues or steps: it receives tensors, ids and paths.
"""

import os

# How torch's threads wait for one another, read once when torch is loaded. By default they spin, and on a
# machine with other work a spinning
# thread keeps the core from the one it waits for: steps of SmolLM2 on two busy cores took 800 to 2,600 ms so,
# 60 to 100 ms when they sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
