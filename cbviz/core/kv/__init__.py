"""The KV cache as the scheduler sees it: blocks, tables, hashes and reservations. No tensors."""
