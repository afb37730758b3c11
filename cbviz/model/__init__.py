"""The real model: weights, tokenizer, decoder and paged KV tensors.

Importing this package loads no torch; its modules `loader`, `decoder`, `ops`, `cpu_ops`, `kv_store` and `sampling` do.
Nothing here knows requests, queues or steps: it receives tensors, ids and paths.
"""
