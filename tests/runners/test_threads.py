"""Many threads on one session of a real (tiny, random) model: the words are those of a run by one thread, and
the cache holds what the block tables say.
"""

from __future__ import annotations

import random
import threading

import pytest

from cbviz.config import ConfigError
from cbviz.core.check import check
from cbviz.messages import RequestError
from cbviz.session import Session
from cbviz.trace.accounting import check_trace
from tests.core.fuzz import same
from tests.runners.test_kv_runs import asked, session

CHANGES = 40
"""Changes that each thread makes."""


def change(s: Session, draw: random.Random) -> None:
    """One random change, none of which takes a request out of the run."""
    kind = draw.choice(["step", "step", "run", "rewind", "configure", "fork", "reset", "sync", "look"])
    if kind == "step":
        s.step(draw.randint(1, 3))
    elif kind == "run":
        s.run(max_steps=draw.randint(1, 5))
    elif kind == "rewind":
        s.rewind(max(0, len(s.trace) - draw.randint(0, 6)))
    elif kind == "configure":
        s.configure(max_num_seqs=draw.randint(2, 4), policy=draw.choice(["fcfs", "sjf", "priority"]))
    elif kind == "fork":
        b = s.fork(at=draw.randint(0, len(s.trace)))
        b.step(2)
        b.drop()
    elif kind == "reset" and draw.random() < 0.2:
        s.reset()
    else:
        s.digest()
        s.here()[0].state()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(3))
def test_the_words_of_a_run_that_many_threads_change_are_those_of_one_thread(seed: int) -> None:
    """Given four threads that step, run, rewind, fork, configure and reset one session, then its cache holds
    what was computed alone, and every request says what it says otherwise.
    """
    requests = asked(seed, 16)
    quiet = session(requests)
    quiet.run()
    s = session(requests, num_blocks=24)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        for _ in range(CHANGES):
            try:
                change(s, draw)
            except (ConfigError, RequestError, IndexError):
                pass  # another thread rewound it meanwhile
            except BaseException as e:
                failed.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads)
    if failed:
        raise failed[0]

    if not s.trace:  # somebody rewound it to the very beginning
        s.step(3)
    if not s.engine.scheduler.state.running:  # it has come to its end: back to its fullest step
        s.rewind(max(s.trace, key=lambda r: r.gauges.num_running).step)
    check(s.engine.scheduler)
    same(s.trace.state(), s.engine.scheduler.state)
    assert s.engine.step_count == len(s.trace)
    assert s.engine.sync() == 0  # no block has to be computed again
    computed = [r.request_id for r in s.state().by_index if r.block_ids and r.num_computed_tokens]
    assert computed
    for i in computed:
        assert s.alone(i).equal, i
    s.run()
    check_trace(s.trace)
    assert {i: s.outputs(i) for i in s.request_ids} == {i: quiet.outputs(i) for i in quiet.request_ids}
