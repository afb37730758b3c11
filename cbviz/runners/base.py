"""What an engine asks of whatever makes tokens.

Owns the protocol and its error. Runners know no queues, policies or clocks of a run: one step's plan comes
in, tokens go out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cbviz.messages import RunnerOutput, SchedulerOutput
from cbviz.specs import ModelSpec

if TYPE_CHECKING:
    from cbviz.model.tokenizer import Tokenizer


class RunnerError(RuntimeError):
    """A plan cannot be executed as it stands.

    The message names the request. Nothing was computed, and the KV ledger claims nothing new.
    """


@runtime_checkable
class Runner(Protocol):
    """Executes plans. A runner may cache KV, but everything it must give back follows from the plans."""

    @property
    def spec(self) -> ModelSpec:
        """Shape and sizes of what runs, as it is held here."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: this runner's tokens stand for no text."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence. The runner only returns them; the scheduler stops."""
        ...

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """Computes the plan's chunks and returns one new token for each chunk that samples."""
        ...

    def sync(self, tables: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[int]]) -> int:
        """Makes the KV cache hold what running requests need: by request id, its block table and the token
        ids computed so far.

        Used after a restore or fork. Returns the number of blocks that were computed again.
        """
        ...

    def damaged_blocks(self) -> set[int]:
        """Blocks that the last pass was writing when it failed; empty after a pass that succeeded.

        A step that is taken back may not trust them.
        """
        ...

    def reset(self) -> None:
        """Forgets all KV contents."""
        ...
