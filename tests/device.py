"""A stricter stand-in for a card: what a recorded pass launched is kept as calls on tensors, and a replay
makes these calls again on the same tensors.

So a value that the host read while the pass was recorded stays what it was, as it does in a CUDA graph, and
reading one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cbviz.model.graphs import InOrder

_WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::repeat_interleave.Tensor",
)
"""Operators for which the host would have to wait for the device."""


class WouldWait(RuntimeError):
    pass


class NoWaiting(TorchDispatchMode):
    """Raises where the host would wait for a card. Keeps every call where `calls` is a list."""

    def __init__(self, calls: list[tuple[Any, ...]] | None = None) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        by_mask = func.name().startswith("aten::index") and any(
            isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1:2])
        )
        if func.name().startswith(_WAITS) or by_mask:
            raise WouldWait(f"{func.name()} makes the host wait for the device")
        out = func(*args, **kwargs)
        if self.calls is not None:
            self.calls.append((func, args, kwargs, out))
        return out


class Tape(InOrder):
    """`captures`: how many passes were recorded. `fail`: an exception that the next capture raises."""

    def __init__(self) -> None:
        self.captures = 0
        self.fail: Exception | None = None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.fail is not None:
            raise self.fail
        self.captures += 1
        calls: list[tuple[Any, ...]] = []
        with NoWaiting(calls):
            work()

        @torch.inference_mode()
        def replay() -> None:
            for func, args, kwargs, out in calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay
