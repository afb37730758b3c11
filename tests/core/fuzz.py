"""Random workloads over tiny pools, and a judge that looks at everything after every step: what the tests of
core, engine and session share.

`LedgerRunner` stands for a model: it keeps what every KV slot holds and refuses to read a slot that holds
anything but what it should.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cbviz import events as ev
from cbviz.config import EngineConfig
from cbviz.core.check import check
from cbviz.core.kv.block_pool import NULL_BLOCK
from cbviz.core.policy import POLICIES
from cbviz.core.state import ControlState
from cbviz.cost import devices, make, models
from cbviz.disciplines import DISCIPLINES
from cbviz.engine.engine import Engine
from cbviz.messages import RequestSpec, RunnerOutput, Sampling, SchedulerOutput, StepRecord, child_spec
from cbviz.runners.sim import SimRunner
from cbviz.trace.accounting import check_record
from cbviz.trace.schema import TraceHeader
from cbviz.trace.state import State
from cbviz.trace.trace import Trace

SPEC = models.get("SmolLM2-135M")
DISCIPLINE_NAMES = tuple(DISCIPLINES)
POLICY_NAMES = tuple(POLICIES)
CAPABILITIES = ["schedule", "blocks", "tokens", "reasons", "accounting", "time", "cost", "queue"]


class LedgerRunner(SimRunner):
    """Made-up tokens over real bookkeeping: slot (block, offset) holds a hash of all tokens up to it, as KV
    does in a causal model.

    Like a layer, it writes the slots of all chunks first and reads afterwards. `fail` is asked before each
    pass, with the plan; if it returns an exception, half of the slots are written and the exception is
    raised.
    """

    def __init__(
        self, config: EngineConfig, fail: Callable[[SchedulerOutput], BaseException | None] | None = None
    ) -> None:
        super().__init__(SPEC, config.seed)
        self.block_size = config.block_size
        self.window, self.sinks = config.sliding_window, config.attention_sinks
        self.healed = 0
        """Blocks that a copy should have brought and did not: computed again.

        More than 0 only after a restore or a failed step.
        """
        self.limit = config.max_model_len or 0
        self.slots: dict[tuple[int, int], int] = {}
        self.fail = fail
        self.before: Callable[[], None] = lambda: None
        """Called before each pass."""
        self.host: dict[tuple[int, int], int] = {}
        self._chains: dict[str, list[int]] = {}
        self._writing: set[int] = set()

    def chain(self, request_id: str, tokens: Sequence[int], end: int) -> list[int]:
        have = self._chains.setdefault(request_id, [])
        while len(have) < end:
            have.append(hash((have[-1] if have else 0, tokens[len(have)])))
        return have

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        self.before()
        size = self.block_size
        writes: list[tuple[tuple[int, int], int]] = []
        for c in plan.chunks:
            end = c.start + c.num_tokens
            known = end - c.num_draft
            assert (
                c.num_tokens > c.num_draft and known <= len(c.tokens) and end <= len(c.block_table) * size
            ), f"{c}: {len(c.tokens)} tokens, table {c.block_table}"
            assert not c.num_draft or (
                c.sample
                and known == len(c.tokens)
                and c.draft_token_ids is not None
                and len(c.draft_token_ids) == c.num_draft
            ), c
            chain = self.chain(c.request_id, c.tokens, known)
            drafted = (
                [hash((chain[known - 1], *c.draft_token_ids[: j + 1])) for j in range(c.num_draft)]
                if c.draft_token_ids
                else []
            )
            writes += [
                ((c.block_table[p // size], p % size), chain[p] if p < known else drafted[p - known])
                for p in range(c.start, end)
            ]
        error = self.fail(plan) if self.fail is not None else None
        moved = {d for d, _ in plan.swaps_in} | {d for _, d in plan.copies}
        self._writing = {slot[0] for slot, _ in writes} | moved
        assert len({h for _, h in (*plan.swaps_in, *plan.swaps_out)}) == len(plan.swaps_in) + len(
            plan.swaps_out
        ), "a host block moves twice in a step"
        for d, h in plan.swaps_out:
            _move_block(self.slots, d, self.host, h, size)
        for src, dst in plan.copies:
            _move_block(self.slots, src, self.slots, dst, size)
        for d, h in plan.swaps_in:
            _move_block(self.host, h, self.slots, d, size)
        moved = {d for d, _ in plan.swaps_in}
        if moved:  # as the real runner does: what the host does not hold any more is computed again
            mine = [c for c in plan.chunks if moved.intersection(c.block_table)]
            self.healed += self.sync(
                {c.request_id: c.block_table for c in mine}, {c.request_id: c.tokens[: c.start] for c in mine}
            )
        assert NULL_BLOCK not in self._writing, "a write to the null block"
        for slot, _ in writes:
            self.slots.pop(slot, None)
        if error is not None:
            for slot, _ in writes[: len(writes) // 2]:
                self.slots[slot] = -1  # half a value
            raise error
        for slot, value in writes:
            assert self.slots.setdefault(slot, value) == value, (
                f"two requests write different values into slot {slot}"
            )
        for c in plan.chunks:
            chain = self._chains[c.request_id]
            first = max(0, c.start - self.window + 1) if self.window else 0
            for p in (*range(min(first, self.sinks)), *range(first, c.start + c.num_tokens - c.num_draft)):
                slot = c.block_table[p // size], p % size
                assert slot[0] != NULL_BLOCK and self.slots.get(slot) == chain[p], (
                    f"step {plan.step}: {c.request_id} reads position {p} from slot {slot}, which holds "
                    "something else"
                )
        self._writing = set()
        out = super().execute(plan)
        for c in plan.chunks:
            new = out.token_ids.get(c.request_id, [])
            for j, t in enumerate(new[:-1]):  # what was accepted stays
                p = c.start + c.num_tokens - c.num_draft + j
                self.slots[c.block_table[p // size], p % size] = self.chain(
                    c.request_id, [*c.tokens, *new[: j + 1]], p + 1
                )[p]
                assert t == c.draft_token_ids[j]  # type: ignore[index]
            if new and plan.drafting is not None and plan.drafting.method in ("self-draft", "draft-model"):
                at = c.start + c.num_tokens - c.num_draft + len(new) - 1
                ends = min(at + plan.drafting.num_tokens, self.limit)
                assert ends <= len(c.block_table) * size, (
                    f"{c}: no slots for drafts up to {ends}, table {c.block_table}"
                )
                for p in range(at, ends):  # the drafting layers' own, of no use to anybody else
                    self.slots[c.block_table[p // size], p % size] = -2
        return out

    def sync(self, tables: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[int]]) -> int:
        again = set()
        for rid, ids in tokens.items():
            chain = self.chain(rid, ids, len(ids))
            for p in range(len(ids)):
                slot = tables[rid][p // self.block_size], p % self.block_size
                if slot[0] != NULL_BLOCK and self.slots.get(slot) != chain[p]:
                    self.slots[slot] = chain[p]
                    again.add(slot[0])
        return len(again)

    def damaged_blocks(self) -> set[int]:
        return self._writing

    def reset(self) -> None:
        self.slots.clear()
        self.host.clear()
        self._writing = set()


def _move_block(
    here: dict[tuple[int, int], int], a: int, there: dict[tuple[int, int], int], b: int, size: int
) -> None:
    for i in range(size):
        there.pop((b, i), None)
        if (a, i) in here:
            there[b, i] = here[a, i]


@dataclass
class Case:
    """A workload, the engine's config, and what the user does: step -> inputs done just before it."""

    config: EngineConfig
    specs: list[RequestSpec]
    at: dict[int, list[tuple[str, Any]]] = field(default_factory=dict)

    def __repr__(self) -> str:
        default = EngineConfig()
        changed = {k: v for k, v in self.config.to_dict().items() if v != getattr(default, k)}
        return f"Case({changed}, {len(self.specs)} requests, inputs {self.at})"


def case(
    seed: int, *, inputs: bool = True, limits: bool = False, drafts: bool = False, **fields: Any
) -> Case:
    """A random case; `fields` of EngineConfig are as given.

    `limits`: timeouts, deadlines, full queues, shedding, degradation and sessions may be drawn as well.
    `drafts`: with speculative decoding (where the discipline takes it).

    Equal arguments, equal cases.
    """
    rng = random.Random(f"{seed} {sorted(fields.items())}")
    block_size = rng.randint(1, 16)
    limit = rng.choice((12, 40, 90))
    # room for one to three of the longest requests: blocks run out often
    num_blocks = 1 + max(1, round(-(-limit // block_size) * rng.choice((1.0, 1.2, 1.5, 2.0, 3.0))))
    limit = max(2, min(limit, (num_blocks - 1) * block_size))
    # values that hold from the start come first, so that a fixed field changes no other draw
    drawn: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_model_len": limit,
        "max_num_seqs": rng.choice((1, 3, 4, 8)),
        "enable_prefix_caching": rng.random() < 0.7,
        "discipline": rng.choice(DISCIPLINE_NAMES),
        "policy": rng.choice(POLICY_NAMES),
        "seed": seed,
        "clock": "modelled",
        "sliding_window": rng.choice((0, 0, 0, rng.randint(2, 30))),
        "watermark": rng.choice((0.0, 0.0, 0.0, 0.1)),
        "long_prefill_token_threshold": rng.choice((0, 0, 0, rng.randint(1, 8))),
        "scheduler_reserve_full_isl": rng.choice((None, None, True, False)),
        "victim": rng.choice(
            (None, None, "policy", "last", "lowest-priority", "least-work-lost", "fewest-outputs")
        ),
    }
    budget = rng.choice((None, rng.randint(2, 12), rng.randint(8, 64)))
    drawn.update(fields)
    if (
        budget is not None
        and "max_num_batched_tokens" not in fields
        and DISCIPLINES[drawn["discipline"]].chunked
    ):
        drawn["max_num_batched_tokens"] = budget
    if drawn["sliding_window"] and "attention_sinks" not in fields and drawn.get("preemption_mode") != "swap":
        own = random.Random(f"sinks {seed}")
        drawn["attention_sinks"] = own.choice((0, own.randint(1, 9), own.randint(1, 40)))
    config, _ = EngineConfig(**drawn).resolve(SPEC.max_context)
    longest = rng.choice((limit - 1, max(1, limit // 3), max(1, limit // 3)))
    prefixes = [[rng.randrange(1000) for _ in range(rng.randint(0, limit))] for _ in range(2)] + [[]]
    specs = []
    step, time = 1, 0.0
    for i in range(rng.randint(2, 14)):
        step += rng.choice((0, 0, 0, 1, 2, 9))
        time += rng.choice((0.0, 0.0, 0.0004, 0.01))
        n = rng.randint(1, longest)
        prefix = rng.choice(prefixes)[: rng.randint(0, n)]
        prompt = tuple(prefix + [rng.randrange(1000) for _ in range(n - len(prefix))])
        most = rng.randint((limit - n + 1) // 2, limit - n)
        stop = (SimRunner(SPEC, seed).token(f"r{i}", n + rng.randrange(most)),) if rng.random() < 0.2 else ()
        by_step = rng.random() < 0.6
        specs.append(
            RequestSpec(
                f"r{i}",
                prompt,
                most,
                arrival_s=0.0 if by_step else time,
                arrival_step=step if by_step else None,
                priority=rng.randint(-2, 2),
                sampling=Sampling(stop_token_ids=stop),
                output_len=rng.choice((None, None, rng.randint(1, most))),
            )
        )
    if drafts and not config.rules.pad:
        own = random.Random(f"drafts {seed}")
        drawn = {
            "speculative": own.choice(("ngram", "self-draft", "draft-model")),
            "num_speculative_tokens": own.choice((1, 2, 3, 5, 8)),
            "draft_model": "another",
            "draft_acceptance": own.choice((0.0, 0.3, 0.7, 0.95, 1.0)),
        }
        config = config.replace(**{k: v for k, v in drawn.items() if k not in fields})
    if limits:
        config, specs = _limited(config, specs, random.Random(f"limits {seed}"))
    at: dict[int, list[tuple[str, Any]]] = {}
    for s in specs if inputs else ():
        if rng.random() < 0.2:
            at.setdefault(rng.randint(1, 60), []).append(("abort", s.request_id))
    return Case(config, specs, at)


def _limited(
    config: EngineConfig, specs: list[RequestSpec], rng: random.Random
) -> tuple[EngineConfig, list[RequestSpec]]:
    """With some limits set, some so narrow that most requests meet them, some so wide that few do.

    A step of these cases takes about 0.1 ms of modelled time.
    """

    def some(*values: Any) -> Any:
        return rng.choice((0, 0, *values))

    config = config.replace(
        timeout_s=some(0.001, 0.004, 0.02),
        shed_after_s=some(0.0005, 0.003),
        max_waiting_requests=some(1, 3, 6),
        max_waiting_tokens=some(20, 100),
        degrade_above=some(0.05, 0.2, 0.6),
    )
    changed = []
    for s in specs:
        deadline = rng.choice((None, None, None, s.arrival_s + rng.choice((0.0, 0.002, 0.01))))
        changed.append(msgspec.structs.replace(s, deadline_s=deadline, session=rng.choice((None, "A", "B"))))
    return config, changed


def solo(spec: RequestSpec, seed: int, limit: int) -> list[int]:
    """The request's output when it runs alone: by the meaning of its fields, with no scheduler."""
    runner = SimRunner(SPEC, seed)
    n, out = len(spec.prompt_token_ids), []
    while True:
        t = runner.token(spec.request_id, n + len(out))
        out.append(t)
        if (
            t in spec.sampling.stop_token_ids
            or len(out) in (spec.output_len, spec.max_tokens)
            or n + len(out) >= limit
        ):
            return out


def make_engine(config: EngineConfig, runner: Any = None) -> Engine:
    """An engine with a LedgerRunner (or `runner`) that is checked before each pass."""
    runner = runner or LedgerRunner(config)
    engine = Engine(config, runner, make(config.cost, SPEC, devices.get(config.modelled_device)))
    if isinstance(runner, LedgerRunner):
        runner.before = lambda: check(engine.scheduler)
    return engine


def make_trace(config: EngineConfig) -> Trace:
    return Trace(
        TraceHeader(
            config=config.to_dict(),
            runner="sim",
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            capabilities=CAPABILITIES,
        )
    )


def ask(engine: Engine, inputs: Sequence[tuple[str, Any]]) -> None:
    for op, what in inputs:
        if op == "abort":
            engine.abort(what)
        elif op == "add":
            engine.add(what)
        else:
            engine.configure(**what)


def same(state: State, s: ControlState) -> None:
    """The fold of the trace is the scheduler's state."""
    assert state.waiting == [r.request_id for r in s.waiting]
    assert state.running == [r.request_id for r in s.running]
    for r in s.requests.values():
        f = state.requests[r.request_id]
        assert f.draft_token_ids == r.draft_token_ids
        ours = (
            f.status,
            f.seat_held,
            f.block_ids,
            f.num_computed_tokens,
            f.output_token_ids,
            f.num_preemptions,
            f.num_prompt_tokens,
            f.max_tokens,
            f.priority,
        )
        theirs = (
            r.status.value,
            r.seat_held,
            r.block_ids,
            r.num_computed_tokens,
            r.output_token_ids,
            r.num_preemptions,
            r.num_prompt_tokens,
            r.max_tokens,
            r.priority,
        )
        assert ours == theirs, f"{r.request_id}: the fold has {ours}, the scheduler {theirs}"
        assert f.host_block_ids == r.host_block_ids
        if r.status.value == "running":
            assert f.num_cached_tokens == r.num_cached_tokens
        if r.status.value in ("waiting", "preempted") and r.last_wait is not None:
            assert (f.wait_reason, f.wait_need, f.wait_have) == r.last_wait
    pool = s.pool
    for b in range(1, pool.num_blocks):
        assert state.ref_count(b) == pool.ref_count[b], (
            f"block {b}: the fold counts {state.ref_count(b)} references, the pool {pool.ref_count[b]}"
        )
        assert bool(state.cached[b]) == (pool.block_hash[b] is not None), (
            f"block {b}: cached in the fold {state.cached[b]}, in the pool {pool.block_hash[b]}"
        )
    assert state.num_free_blocks == pool.num_free
    assert sum(1 for r in state.by_index if r.status == "finished") == s.num_finished


def judge(engine: Engine, trace: Trace, record: StepRecord) -> None:
    """All that must hold after a step."""
    check(engine.scheduler)
    check_record(record)
    trace.append(record)
    same(trace.state(), engine.scheduler.state)


def finish(engine: Engine, trace: Trace, c: Case) -> None:
    """All that must hold at the end of a run."""
    s = engine.scheduler.state
    assert not engine.has_work and not s.requests and not s.waiting and not s.running
    assert s.pool.num_free == s.pool.num_blocks - 1, "blocks are missing"
    assert len(s.host.free) == s.host.num_blocks, "host blocks are missing"
    state = trace.state()
    forked = {e.request_id for record in trace for e in record.events if isinstance(e, ev.Forked)}
    specs = [
        y
        for x in c.specs
        for y in (x, *(child_spec(x, i) for i in range(1, x.sampling.n) if x.request_id in forked))
    ]
    assert set(state.requests) == {x.request_id for x in specs}
    for spec in specs:
        r = state.requests[spec.request_id]
        assert r.finished and not r.seat_held
        alone = solo(spec, c.config.seed, c.config.max_model_len or 0)
        if r.status == "refused":
            assert not r.output_token_ids
        elif r.finish_reason in ("abort", "timeout", "deadline", "shed"):
            assert r.output_token_ids == alone[: len(r.output_token_ids)]
        else:
            assert r.output_token_ids == alone, f"{spec.request_id}: other tokens than alone"


def steps(
    c: Case,
    engine: Engine,
    trace: Trace,
    *,
    mirror: Engine | None = None,
    faults: tuple[type[BaseException], ...] = (),
    before: Callable[[], object] = lambda: None,
    most: int = 4000,
) -> Iterator[StepRecord]:
    """Steps a case to its end under the judge's eyes; the records.

    Raises AssertionError if `most` tries are not enough.

    `mirror`: applies each record, as it comes back from a file, and must then stand where `engine` stands.
    `faults`: what a step may raise; all must then be as if it had not been tried, and it is tried again.
    `before`: called before each try.
    """
    engine.enqueue(c.specs)
    if mirror is not None:
        mirror.enqueue(c.specs)
    last = max(c.at, default=0)
    for step in range(1, most + 1):
        ask(engine, c.at.get(step, ()))
        before()
        digest = engine.digest() if faults else None
        try:
            record = engine.step()
        except faults:
            assert engine.digest() == digest
            continue
        if record is None:
            if step > last:
                return
            continue
        judge(engine, trace, record)
        assert not engine.stuck, engine.stuck
        if mirror is not None:
            mirror.apply(msgspec.json.decode(msgspec.json.encode(record), type=StepRecord))
            check(mirror.scheduler)
            assert mirror.digest() == engine.digest(), f"step {record.step}"
            assert mirror.now_s == engine.now_s
            assert mirror.pending_ids == engine.pending_ids
        yield record
    raise AssertionError(f"the run did not end in {most} steps")


def play(
    c: Case,
    engine: Engine | None = None,
    *,
    mirror: Engine | None = None,
    faults: tuple[type[BaseException], ...] = (),
) -> tuple[Engine, Trace]:
    """Runs a case to its end, with everything that must hold there. See `steps`."""
    engine = engine or make_engine(c.config)
    trace = make_trace(c.config)
    for _ in steps(c, engine, trace, mirror=mirror, faults=faults):
        pass
    finish(engine, trace, c)
    return engine, trace
