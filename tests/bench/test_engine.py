"""`cbviz bench engine`: everybody makes the same tokens' number from the same weights, in turn.

No figure is asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cbviz.bench import engine as bench
from cbviz.bench.peer import PeerError, Worker
from cbviz.config import ConfigError, EngineConfig
from cbviz.messages import RequestSpec, Sampling
from cbviz.model.decoder import DecoderConfig, LayerWeights, Weights
from cbviz.model.loader import LoadedModel, load
from cbviz.model.quality import quality
from cbviz.runners.torch_runner import TorchRunner
from cbviz.session import Session

REQUESTS: bench.Requests = [([5, 6, 7], 4), ([1, 2, 3, 4, 5, 6], 2), ([9], 6)]


def made(kind: str = "llama") -> LoadedModel:
    g = torch.Generator().manual_seed(4)
    c = DecoderConfig(kind, 2, 32, 4, 2, 8, 48, 120, 512, 1e-5, windows=(0, 0))

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * 0.3 + (0 if len(shape) == 2 else 1)

    embed = w(120, 32)
    return LoadedModel(
        "made",
        "Made",
        c,
        Weights(
            embed,
            [LayerWeights(w(32), w(64, 32), w(32, 32), w(32), w(96, 32), w(32, 48)) for _ in range(2)],
            w(32),
            embed,
            c.inverse_frequencies(),
        ),
        None,
        (),
    )


def test_the_articles_requests() -> None:
    whole, short = bench.article(1.0, 49152), bench.article(0.1, 49152)
    assert len(whole) == 20 and sum(n for _, n in whole) == 2160
    assert [ids for ids, _ in whole] == [ids for ids, _ in short]
    assert [n for _, n in short] == [max(1, round(n * 0.1)) for _, n in whole]


@pytest.mark.parametrize("precision", ["exact", "fast", "int8"])
def test_ours_makes_what_is_asked_for(precision: str) -> None:
    seconds, produced = (ours := bench.Ours(made(), precision, 1e9)).run(REQUESTS, 2)
    assert produced == 12 and seconds > 0
    assert ours.shares and all(s > 0 for s in ours.shares)


def test_an_exported_model_says_the_same_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    m = made()
    bench.export(m, tmp_path)
    theirs = bench.Transformers(tmp_path)
    seconds, produced = theirs.run(REQUESTS, 2)
    assert produced == 12 and seconds > 0 and theirs.name == f"transformers {transformers.__version__}"
    with torch.inference_mode():
        logits = theirs.model(torch.tensor([[5, 6, 7, 8]])).logits[0]
    s = Session(
        [RequestSpec("a", (5, 6, 7, 8), 1, arrival_step=0, sampling=Sampling(ignore_eos=True))],
        runner=TorchRunner(m, EngineConfig(precision="exact", num_blocks=8)),
        precision="exact",
        num_blocks=8,
    )
    s.run()
    assert s.request("a").output_token_ids == [int(logits[-1].argmax())]
    monkeypatch.setenv("CBVIZ_CACHE", str(tmp_path / "cache"))
    assert torch.equal(load(str(tmp_path)).weights.layers[1].qkv, m.weights.layers[1].qkv)  # type: ignore[arg-type]


def test_only_a_plain_llama_is_handed_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only a plain Llama"):
        bench.export(made("qwen2"), tmp_path)


class Counted:
    """A contender that makes one token too few in its `bad` run."""

    def __init__(self, name: str, log: list[str], bad: int = -1) -> None:
        self.name, self._log, self._bad, self._runs = name, log, bad, 0

    def run(self, requests: bench.Requests, seats: int) -> tuple[float, int]:
        self._log.append(self.name)
        self._runs += 1
        return 0.5 * self._runs, sum(n for _, n in requests) - (self._runs == self._bad)


def test_everybody_in_turn_and_nobody_short(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    told: list[str] = []
    load = bench.measure("article", REQUESTS, 2, [Counted("a", log), Counted("b", log)], 3, told.append)
    assert log == ["a", "b"] * 4 and len(told) == 8
    assert load.contenders["a"].tokens_per_s == [12.0, 8.0, 6.0] and load.contenders["a"].median == 8.0
    assert load.ratio("a", "b") == [1.0, 1.0, 1.0]
    with pytest.raises(RuntimeError, match="b made 11 tokens, 12 were asked for"):
        bench.measure("article", REQUESTS, 2, [Counted("a", log), Counted("b", log, bad=3)], 3, told.append)


def test_who_is_slow_runs_a_load_once_and_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SLOW_S", 1.2)
    log: list[str] = []
    slow = Counted("other 1", log)
    slow.run(REQUESTS, 2)  # so that its first round takes 1.5 seconds; that of `fast` takes 1
    load = bench.measure("article", REQUESTS, 2, [Counted("fast", log), slow], 3, log.append)
    assert log.count("fast") == 4 and log.count("other 1") == 3
    assert load.contenders["other 1"].tokens_per_s == [8.0] and load.ratio("fast", "other 1") == [1.5]
    contenders = {
        n: {"tokens_per_s": t.tokens_per_s, "median": t.median, "floor_share": None}
        for n, t in load.contenders.items()
    }
    text = bench.table(
        {
            "model": "m",
            "threads": 1,
            "kernels": "",
            "rounds": 3,
            "device": {"bandwidth_bytes_s": 1e9},
            "decode": [],
            "quality": {},
            "notes": [],
            "loads": [
                {
                    "name": "article",
                    "seats": 2,
                    "requests": 3,
                    "output_tokens": 12,
                    "contenders": contenders,
                    "ratios": {"fast": {"other 1": 1.5}},
                }
            ],
        }
    )
    assert "other 1: 1 of 3 rounds, a run takes 2 s" in text and "fast: 1 of" not in text
    long = {n.replace("other", "transformers-continuous"): t for n, t in contenders.items()}
    ratios = {"fast": {"transformers-continuous 1": 1.5}}
    head, row = bench.table(
        {
            "model": "m",
            "threads": 1,
            "kernels": "",
            "rounds": 1,
            "device": {"bandwidth_bytes_s": 1e9},
            "decode": [],
            "quality": {},
            "notes": [],
            "loads": [
                {
                    "name": "article",
                    "seats": 2,
                    "requests": 3,
                    "output_tokens": 12,
                    "contenders": long,
                    "ratios": ratios,
                }
            ],
        }
    ).splitlines()[4:6]
    assert (
        head.index("/ transformers-continuous") + len("/ transformers-continuous") == row.index("1.50") + 4
    )  # a figure stands below its head


class Failing(Counted):
    """An engine in another process that breaks in its `bad` run."""

    def run(self, requests: bench.Requests, seats: int) -> tuple[float, int]:
        if self._runs + 1 == self._bad:
            raise PeerError(f"{self.name}: it broke")
        return super().run(requests, seats)


@pytest.mark.parametrize(
    "bad, speeds", [(1, None), (2, None), (3, [12.0])], ids=["at once", "in the first round", "later"]
)
def test_a_peer_that_fails_costs_nobody_else_anything(bad: int, speeds: list[float] | None) -> None:
    log: list[str] = []
    lost: dict[str, str] = {}
    peers = [Counted("fast", log), Failing("other 1", log, bad)]
    load = bench.measure("article", REQUESTS, 2, peers, 3, lambda note: None, lost)
    assert lost == {"other 1": "other 1: it broke"}
    assert load.contenders["fast"].tokens_per_s == [12.0, 8.0, 6.0]
    assert (load.contenders["other 1"].tokens_per_s if "other 1" in load.contenders else None) == speeds
    asked = len(log)
    again = bench.measure("alone", REQUESTS[:1], 1, peers, 1, lambda note: None, lost)
    assert list(again.contenders) == ["fast"] and log[asked:] == ["fast", "fast"]


def test_a_worker_without_the_engine_says_so() -> None:
    with pytest.raises(ConfigError, match=r"llama does not run in .*: ModuleNotFoundError"):
        bench.Foreign("llama", sys.executable, Path("x.gguf"), 1, 1, 64)


def test_a_worker_that_dies_says_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text("import sys; print('no room', file=sys.stderr); sys.exit(3)")
    with (
        Worker(sys.executable, str(tmp_path / "w.py")) as w,
        pytest.raises(PeerError, match="ended with 3: no room"),
    ):
        w.ask("hello")


def test_quality_of_the_same_is_perfect_and_of_int8_is_not() -> None:
    m, sequences = made(), [[5, 6, 7, 8, 9] * 6, [1, 2, 3]]
    same = quality(m, "exact", sequences)
    assert (same.positions, same.max_logit_error, same.agreement, same.lead_lost) == (33, 0.0, 1.0, 0.0)
    fast, eight = quality(m, "fast", sequences), quality(m, "int8", sequences)
    assert 0 < fast.max_logit_error < eight.max_logit_error < same.max_logit
    assert fast.rms_logit_error < fast.max_logit_error


class Llama(Counted):
    """In place of another Python with llama.cpp: refuses more sequences at once than it was made for, as
    llama.cpp does.
    """

    most = 99

    def __init__(self, kind: str, python: str, model: Path, num_threads: int, seats: int, room: int) -> None:
        super().__init__("llama.cpp 0", [])
        assert kind == "llama" and model.suffix == ".gguf"
        self._seats = min(seats, self.most)

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        if len(prompts) > self._seats:
            raise PeerError("llama_decode failed")
        return [0.01] * steps

    def close(self) -> None:
        pass


@pytest.mark.model
def test_the_whole_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    progress: Callable[[int, int, str], None] = lambda *a: told.append(a)  # noqa: E731
    monkeypatch.setattr(bench, "Foreign", Llama)
    r = bench.run(
        precisions=("fast",),
        rounds=1,
        share=0.02,
        num_requests=3,
        with_transformers=False,
        vllm_python=None,
        llama_python="python",
        decode_rounds=1,
        progress=progress,
    )
    assert [x["name"] for x in r["loads"]] == ["article", "alone"] and r["clock"] == "measured"
    assert all(x["contenders"]["fast"]["median"] > 0 for x in r["loads"])
    assert [(x["batch"], list(x["contenders"])) for x in r["decode"]] == [
        (n, ["fast", "llama.cpp 0"]) for n in (1, 4, 8, 16)
    ]
    assert all(len(x["contenders"]["fast"]["pass_s"]) == 1 for x in r["decode"])
    assert r["quality"]["fast"]["positions"] > 100
    text = bench.table(r)
    assert "vllm: not measured" in text and "fast against float32" in text and "batch 16 " in text


@pytest.mark.model
def test_a_bench_outlives_a_peer_that_fails_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "Foreign", Llama)
    monkeypatch.setattr(Llama, "most", 4)
    monkeypatch.setattr(bench.decode, "measure", partial(bench.decode.measure, batches=(1, 8), steps=2))
    r = bench.run(
        precisions=("int8",),
        rounds=1,
        share=0.01,
        num_requests=2,
        with_transformers=False,
        llama_python="python",
        decode_rounds=1,
    )
    assert [(x["batch"], list(x["contenders"])) for x in r["decode"]] == [
        (1, ["int8", "llama.cpp 0"]),
        (8, ["int8"]),
    ]
    text = bench.table(r)
    assert (
        "failed, and was asked no more: llama_decode failed" in text
        and "int8 decode steps over llama.cpp Q4_1, alone" in text
    )
    assert "int8 decode steps over llama.cpp Q4_1, batch 8" not in text
