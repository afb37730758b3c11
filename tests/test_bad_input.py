"""Whatever is handed to a session or a request is refused with the field's name and the limit, before
anything has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import cbviz as cb
from cbviz import ConfigError, RequestError, RequestSpec, Sampling

NAN = math.nan


def session() -> cb.Session:
    return cb.Session(None, runner="sim", num_blocks=32)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": None}, "a prompt is text or a list of token ids, got None"),
        ({"prompt": 5}, "a prompt is text or a list of token ids, got 5"),
        ({"prompt": b"words"}, "a prompt is text or a list of token ids"),
        ({"prompt": [1, 1.5]}, "got 1.5 among the ids"),
        ({"prompt": [True]}, "got True among the ids"),
        ({"prompt": [-1]}, "token id -1 is outside the model's vocabulary 0..49151"),
        (
            {"prompt": "word " * 600},
            "the prompt has 600 tokens; with max_model_len 496 it may have at most 495",
        ),
        ({"max_tokens": 0}, "max_tokens is 0, the least is 1"),
        ({"max_tokens": -5}, "max_tokens is -5, the least is 1"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, got 1.5"),
        ({"max_tokens": NAN}, "max_tokens must be a whole number, got nan"),
        ({"max_tokens": 10**9}, "over max_model_len 496: lower max_tokens to 494"),
        ({"priority": "high"}, "priority must be a whole number, got 'high'"),
        ({"priority": NAN}, "priority must be a whole number, got nan"),
        ({"deadline_s": NAN}, "deadline_s is nan, it must be a finite number of seconds, 0 or more"),
        ({"deadline_s": -1.0}, "deadline_s is -1.0"),
        ({"request_id": 5}, "request_id must be text, got 5"),
        ({"sampling": {"temperature": 1}}, "sampling must be a Sampling"),
    ],
)
def test_add(arguments: dict[str, Any], says: str) -> None:
    s = session()
    before = s.digest()
    with pytest.raises(RequestError) as e:
        s.add(**{"prompt": "two words", **arguments})
    assert says in str(e.value)
    assert s.digest() == before
    assert s.num_requests == 0
    assert s.run() is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sampling(temperature=NAN), "temperature is nan, it must lie in 0..100"),
        (lambda: Sampling(temperature="hot"), "temperature must be a number, got 'hot'"),  # type: ignore[arg-type]
        (lambda: Sampling(top_k=1.5), "top_k must be a whole number, got 1.5"),  # type: ignore[arg-type]
        (lambda: Sampling(top_k=-1), "top_k is -1, the least is 0"),
        (lambda: Sampling(top_p=0.0), "top_p is 0.0, it must lie in (0, 1]"),
        (lambda: Sampling(seed="x"), "seed must be a whole number, got 'x'"),  # type: ignore[arg-type]
        (lambda: Sampling(stop_token_ids=5), "stop_token_ids must be a tuple of token ids, got 5"),  # type: ignore[arg-type]
        (lambda: Sampling(ignore_eos="yes"), "ignore_eos must be true or false, got 'yes'"),  # type: ignore[arg-type]
        (lambda: RequestSpec("a", (1,), "2"), "a: max_tokens must be a whole number, got '2'"),  # type: ignore[arg-type]
        (lambda: RequestSpec("a", "abc", 2), "a: prompt_token_ids must be a tuple of token ids, got 'abc'"),  # type: ignore[arg-type]
        (lambda: RequestSpec("", (1,), 2), "request_id is empty"),
        (lambda: RequestSpec("a", (), 2), "a: the prompt is empty; it needs at least 1 token"),
        (lambda: RequestSpec("a", (1,), 2, arrival_s=NAN), "a: arrival_s is nan"),
        (lambda: RequestSpec("a", (1,), 2, arrival_s="now"), "a: arrival_s must be a number, got 'now'"),  # type: ignore[arg-type]
        (lambda: RequestSpec("a", (1,), 2, arrival_step=-1), "a: arrival_step is -1, the least is 0"),
        (lambda: RequestSpec("a", (1,), 2, output_len=0), "a: output_len is 0, the least is 1"),
        (lambda: RequestSpec("a", (1,), 2, ttft_slo_s=NAN), "a: ttft_slo_s is nan"),
    ],
)
def test_requests(make: Callable[[], object], says: str) -> None:
    with pytest.raises(RequestError) as e:
        make()
    assert says in str(e.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"workload": 5}, "workload is 5, it must be a preset's name"),
        ({"workload": "artcle"}, "did you mean 'article'?"),
        ({"runner": "simm"}, "runner is 'simm', it must be one of torch, sim"),
        ({"runner": None}, "runner must be torch, sim or a Runner, got None"),
        ({"model": None}, "model must be a name or a path, got None"),
        ({"model": "nope"}, "unknown model 'nope'"),
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"seed": -1}, "seed is -1, the least is 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be a whole number, got True"),
        ({"max_num_seqs": "8"}, "max_num_seqs must be a whole number, got '8'"),
        ({"num_blocks": 1}, "num_blocks is 1, the least is 2"),
        ({"watermark": NAN}, "watermark must be finite, got nan"),
        ({"max_seqs": 4}, "did you mean 'max_num_seqs'?"),
        ({"policy": "sfj"}, "policy is 'sfj'"),
        ({"clock": "measured"}, "clock is 'measured', but runner sim"),
        ({"modelled_device": "h1000"}, "unknown device 'h1000'"),
    ],
)
def test_sessions(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as e:
        cb.Session(**{"workload": None, "runner": "sim", **arguments})
    assert says in str(e.value)


def test_a_list_that_holds_no_requests() -> None:
    with pytest.raises(RequestError, match="the list holds 1"):
        cb.Session([1], runner="sim")  # type: ignore[list-item]


@pytest.mark.parametrize("n", [0, -1, 1.5, "two", None])
def test_steps_are_whole(n: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a whole number of steps"):
        session().step(n)
