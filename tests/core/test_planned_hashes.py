"""A request taken out of a step: what it would have computed can't be hit, unless vLLM's recordings are
replayed.
"""

from __future__ import annotations

from cbviz.config import EngineConfig
from cbviz.core.check import check
from cbviz.core.scheduler import Scheduler
from cbviz.messages import RequestSpec, RunnerOutput


def starts_of_r0(keep: bool) -> list[int]:
    """r0, of low priority, is given a chunk of 16 tokens; then r1 behind it needs a block, and r0 loses all
    of its own in the same step. Where r0's chunks start.
    """
    config = EngineConfig(
        discipline="vllm",
        policy="priority",
        block_size=4,
        num_blocks=17,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=2048,
        long_prefill_token_threshold=16,
        scheduler_reserve_full_isl=False,
    )
    s = Scheduler(config, keep_planned_hashes=keep)
    starts: list[int] = []
    for step in range(6):
        s.begin()
        if step == 0:
            s.add(RequestSpec("r0", tuple(range(56)), 4, priority=5))
            s.add(RequestSpec("r2", (7, 7, 7), 1, priority=9))
        elif step == 1:
            s.add(RequestSpec("r1", tuple(range(100, 116)), 3))
        plan = s.schedule()
        check(s)
        starts += [c.start for c in plan.chunks if c.request_id == "r0"]
        assert plan.preempted_ids == (["r0"] if step == 2 else [])
        s.update(plan, RunnerOutput({c.request_id: [500] for c in plan.chunks if c.sample}))
        check(s)
    return starts


def test_only_what_was_computed_is_hit() -> None:
    """32 tokens were computed before the preemption; it resumes there."""
    assert starts_of_r0(False)[:3] == [0, 16, 32]


def test_as_vllm_does_it() -> None:
    """vLLM 0.32 (played with the same requests) resumes at 44: three blocks hit that nothing was ever written
    to.
    """
    assert starts_of_r0(True)[:3] == [0, 16, 44]
