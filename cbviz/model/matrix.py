"""A weight matrix in one of three forms: float32, 16 bits, or 8 bits with a scale a row.

Owns their meaning and how they are made from float32.

    float32   torch.Tensor [out, in]
    16 bits   torch.Tensor [out, in], IEEE half: relative rounding 2^-11
    8 bits    Int8Matrix: q * scale[row]; the largest number of a row becomes 127 or -127

Activations are no matter of this module: who multiplies says what it does with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import torch

from cbviz.model.hub import ModelError

PRECISIONS = ("exact", "fast", "int8")
_HALF_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """`q` int8 [out, in], `scale` float32 [out]."""

    q: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    def numel(self) -> int:
        return self.q.numel()


Matrix = Union[torch.Tensor, Int8Matrix]  # noqa: UP007 - an alias at run time, on Python 3.10


def convert(weight: torch.Tensor, precision: str) -> Matrix:
    """A float32 matrix in the form that `precision` holds it in.

    Raises ModelError for numbers that 16 bits cannot hold.
    """
    if precision == "exact":
        return weight
    if precision == "fast":
        if (top := float(weight.abs().max())) > _HALF_MAX:
            raise ModelError(
                f"precision 'fast' holds weights in 16 bits, up to {_HALF_MAX:,.0f}; this model has a "
                f"weight of {top:.3g}. Set precision to 'exact'."
            )
        return weight.half()
    if precision == "int8":
        scale = weight.abs().amax(dim=1) / 127
        q = torch.round(weight / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).to(torch.int8)
        return Int8Matrix(q, scale)
    raise ModelError(f"precision is {precision!r}, it must be one of {', '.join(PRECISIONS)}")


def dense(m: Matrix) -> torch.Tensor:
    """The float32 matrix that `m` stands for."""
    if isinstance(m, Int8Matrix):
        return m.q.float() * m.scale[:, None]
    return m.float()


def rows(m: Matrix, ids: torch.Tensor) -> torch.Tensor:
    """Rows `ids` as float32: an embedding lookup."""
    if isinstance(m, Int8Matrix):
        return dense(Int8Matrix(m.q[ids], m.scale[ids]))
    return torch.nn.functional.embedding(ids, m).float()


def num_bytes(m: Matrix) -> int:
    """Bytes it is held in."""
    return m.q.numel() + 4 * m.scale.numel() if isinstance(m, Int8Matrix) else m.numel() * m.element_size()


def to_device(m: Matrix, device: torch.device | str) -> Matrix:
    return Int8Matrix(m.q.to(device), m.scale.to(device)) if isinstance(m, Int8Matrix) else m.to(device)
