"""`cbviz bench kernels`: the same rows from any machine, and figures that agree with one another."""

from __future__ import annotations

import pytest

from cbviz.bench import kernels
from cbviz.config import ConfigError


@pytest.mark.slow
def test_every_operator_against_the_reference() -> None:
    result = kernels.run(device="cpu", quick=True, rounds=1)
    rows = result["rows"]
    operators = {r["operator"] for r in rows}
    assert operators == {
        "attention",
        "rotate and write",
        "product qkv",
        "product gate_up",
        "product down",
        "product head",
        "add and norm",
        "gate",
        "choose",
    }
    for operator in operators:
        assert any(r["operator"] == operator and r["contender"] == "reference" for r in rows)
    for r in rows:
        assert (
            r["us"] > 0
            and r["bytes_s"] == pytest.approx(r["bytes"] / r["us"] * 1e6)
            and r["share"] == pytest.approx(r["bytes_s"] / result["bandwidth_bytes_s"])
        )
        assert r["contender"] != "reference" or r["against_reference"] == 1
    text = kernels.table(result)
    assert result["device"] in text and "bandwidth" in text and text.count("reference") > len(operators)
    # 8 sequences of 256 keys: keys and values of 3 heads of 64 in 16 bits, queries and results of 9 heads in
    # float32.
    assert (
        next(r["bytes"] for r in rows if r["operator"] == "attention")
        == 8 * 256 * 2 * 3 * 64 * 2 + 2 * 8 * 9 * 64 * 4
    )


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        kernels.run(device="tpu")
