"""The real engine in contiguous mode: the same tokens as with paging, in every discipline that differs in its
chunks.
"""

from __future__ import annotations

import pytest

from cbviz import events as ev
from cbviz.config import EngineConfig
from cbviz.messages import RequestSpec, Sampling
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session
from tests.runners.test_torch_runner import MODEL, VOCAB

SPECS = [
    RequestSpec(
        f"r{i}",
        tuple((7 * i + 3 * k) % (VOCAB - 4) + 4 for k in range(n)),
        out,
        arrival_step=1 + i // 3,
        sampling=Sampling(ignore_eos=True),
    )
    for i, (n, out) in enumerate(((9, 12), (30, 4), (3, 20), (17, 9), (5, 30), (12, 6), (21, 11)))
]


def run(**fields: object) -> Session:
    config = {
        "num_blocks": 24,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 6,
        "precision": "exact",
        "clock": "measured",
        **fields,
    }
    s = Session(SPECS, runner=TorchRunner(MODEL, EngineConfig(**config)), **config)
    s.run()
    return s


@pytest.mark.parametrize("discipline", ["static-padded", "chunked", "vllm"])
def test_tokens_are_those_of_paging(discipline: str) -> None:
    paged, s = run(discipline=discipline), run(discipline=discipline, kv_allocation="contiguous")
    assert {i: s.request(i).output_token_ids for i in s.request_ids} == {
        i: paged.request(i).output_token_ids for i in paged.request_ids
    }
    assert discipline == "static-padded" or any(
        e.reason in ("reserve", "fragments")
        for r in s.trace
        for e in r.events
        if isinstance(e, ev.NotAdmitted)
    )  # memory was short
    s.rewind(5)
    s.run()
    assert {i: s.request(i).output_token_ids for i in s.request_ids} == {
        i: paged.request(i).output_token_ids for i in paged.request_ids
    }
