"""A mixture-of-experts language model small enough to ship: weights, tokenizer, provenance (README.md), and
the script that made them (`train`).
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""Holds config.json, model.safetensors and tokenizer.json, as any model folder does."""
