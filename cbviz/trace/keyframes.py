"""How far apart kept copies of a state stand: every 100 steps, and twice as far each time their total size
passes a limit.

A run with 20,000 waiting requests has copies of megabytes; kept every 100 steps they would fill the memory.
Seeking then folds at most `Spacing.every` steps. Knows steps and sizes, not what is kept.
"""

from __future__ import annotations

from cbviz.trace.schema import KEYFRAME_EVERY

MOST_STATE_NUMBERS = 6_000_000
"""Limit of a trace's kept drawn states together, in numbers (`State.size`): some 100 MB."""
MOST_KEYFRAME_BYTES = 64 << 20
"""Limit of a trace's keyframes of the control plane together, in bytes as they stand in a file."""


class Spacing:
    """Which of the copies offered are kept, so that all together stay below `most`.

    One alone is kept whatever its size.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.every = KEYFRAME_EVERY
        self.sizes: dict[int, int] = {}

    def wants(self, step: int) -> bool:
        """Is a copy to be kept after this step?"""
        return step % self.every == 0

    def keep(self, step: int, size: int) -> list[int]:
        """Counts a copy. Returns the steps whose copies are to be dropped now."""
        self.sizes[step] = size
        dropped: list[int] = []
        while len(self.sizes) > 1 and sum(self.sizes.values()) > self.most:
            self.every *= 2
            dropped += [s for s in self.sizes if s % self.every]
            self.sizes = {s: n for s, n in self.sizes.items() if s % self.every == 0}
        return dropped

    def before(self, step: int) -> int:
        """The last step up to `step` after which a copy may be kept."""
        return step - step % self.every
