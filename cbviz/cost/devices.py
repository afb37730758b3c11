"""Peak figures of devices from data sheets, with their sources.

Owns the table `DEVICES`; knows no model and measures nothing (`calibrate` does).

Dense rates, 16-bit operands with 32-bit accumulation where the device has it; 10^9 bytes and 10^12 operations
a second in the rows, SI units in the specs. No device reaches its peaks: what is computed from them is a
lower bound of time.
"""

from __future__ import annotations

import difflib
import re

from cbviz.config import ConfigError
from cbviz.specs import DeviceSpec

AIC = "aiconfigurator-core 0.12.0 systems/*.yaml (Apache-2.0)"


def _row(
    name: str,
    memory_gib: float,
    bandwidth_gb_s: float,
    tflops: float,
    source: str,
    *,
    kind: str = "gpu",
    link_gb_s: float = 0.0,
    sure: str = "high",
    note: str = "",
) -> DeviceSpec:
    """One line of the table.

    `link_gb_s`: one direction, one device. `sure`: how well the row is founded; below `high` the spec's
    source says so.
    """
    source += f"; {note}" if note else ""
    source += f"; certainty: {sure}" if sure != "high" else ""
    return DeviceSpec(
        name,
        memory_gib * 2**30,
        bandwidth_gb_s * 1e9,
        tflops * 1e12,
        kind=kind,
        link_bytes_s=link_gb_s * 1e9,
        source=source,
    )


_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63.0e9
"""Bytes a second of 16 lanes, one direction: 8, 16 or 32 GT/s a lane at 128b/130b (PCI-SIG). What a copy
really reaches is some 80 to 90 % of it.
"""
_OF_PCIE_3 = ("T4", "V100")
_OF_PCIE_5 = ("H100", "H200", "B200", "B300", "RTX PRO 6000", "RTX 5090", "MI300X")


def host_link_bytes_s(device: DeviceSpec) -> float:
    """Bytes a second between the device and its host's memory, one direction, at most.

    `link_bytes_s` is another thing: from device to device (NVLink).

    A CPU, or a system with one memory, copies within it: each byte is read and written, so half its
    bandwidth. The GB200's GPU hangs on its CPU by NVLink-C2C, 450 GB/s.
    """
    if device.kind != "gpu":
        return device.bandwidth_bytes_s / 2
    if "GB200" in device.name:
        return 450e9
    return (
        _PCIE_3
        if any(x in device.name for x in _OF_PCIE_3)
        else _PCIE_5
        if any(x in device.name for x in _OF_PCIE_5)
        else _PCIE_4
    )


_APPLE = "shared memory; the GPU's float32 rate, about the same at 16 bits"
DEVICES: dict[str, DeviceSpec] = {
    d.name: d
    for d in (
        _row(
            "NVIDIA T4",
            16,
            320,
            65,
            "nucleusbox.com T4/A10/A100 table (65 TF FP16, 320 GB/s); NVIDIA T4 data sheet, not rechecked",
            note="fp16 only: Turing has no bf16",
        ),
        _row(
            "NVIDIA V100 SXM2 32GB",
            32,
            900,
            125,
            "NVIDIA V100 data sheet, not rechecked; ozyphus.github.io",
            link_gb_s=150,
            note="fp16 only",
        ),
        _row(
            "NVIDIA A10G",
            24,
            600,
            70,
            "baseten.co A10 vs A10G (24 GB, 600 GB/s); 70 TFLOP/s not rechecked against NVIDIA's A10G sheet",
            sure="medium",
            note="some pages print 125, which is the A10 (125 dense); 140 is the sparse figure",
        ),
        _row("NVIDIA A10", 24, 600, 125, "NVIDIA A10 data sheet; nucleusbox.com"),
        _row("NVIDIA L4", 24, 300, 121, AIC, note="the 242/485 often printed are sparse figures"),
        _row("NVIDIA L40S", 44.99, 864, 362.05, AIC, note="48 GB card; 46068 MiB usable in the source"),
        _row("NVIDIA A30", 24, 933, 165, AIC),
        _row(
            "NVIDIA A40",
            48,
            696,
            149.7,
            (
                "vidur device_sku_config.py (150 TFLOP/s, 45 GB usable); 696 GB/s not rechecked against the "
                "data sheet"
            ),
            sure="medium",
        ),
        _row(
            "NVIDIA A100 40GB SXM",
            40,
            1555,
            312,
            "NVIDIA A100 data sheet, not rechecked; nucleusbox.com (1.6 TB/s)",
            link_gb_s=300,
        ),
        _row("NVIDIA A100 80GB SXM", 80, 2039, 312, AIC, link_gb_s=300),
        _row("NVIDIA A100 80GB PCIe", 80, 1935, 312, AIC),
        _row("NVIDIA H100 SXM", 80, 3350, 989, AIC, link_gb_s=450),
        _row("NVIDIA H100 PCIe", 80, 2000, 756.5, AIC),
        _row(
            "NVIDIA H200 SXM",
            141,
            4800,
            989,
            AIC,
            link_gb_s=450,
            note="marketed as 141 GB; drivers report about 140 GiB",
        ),
        _row(
            "NVIDIA B200 SXM",
            180,
            7700,
            2250,
            AIC,
            link_gb_s=900,
            note="some pages print 192 GB and 8.0 TB/s",
        ),
        _row(
            "NVIDIA RTX PRO 6000 Blackwell (server)",
            95.59,
            1792,
            467.8,
            AIC,
            note=(
                "97887 MiB reported; LLMServingSim configures 1597 GB/s for the card its runs used (a "
                "lower-clocked edition)"
            ),
        ),
        _row("NVIDIA B300 SXM", 268.6, 7750, 2250, AIC, link_gb_s=900),
        _row("NVIDIA GB200 (one GPU)", 185.0, 8000, 2500, AIC, link_gb_s=900),
        _row(
            "Intel Arc Pro B60",
            24,
            456,
            98.3,
            AIC,
            sure="medium",
            note="int8 twice the bf16 rate is likely; the source prints the same figure for fp8",
        ),
        _row(
            "AMD Instinct MI300X",
            192,
            5300,
            1307,
            (
                "llmbook.apartsin.com (192 GB, 5.3 TB/s, 1307/2615); agrees with AMD's data sheet, not "
                "rechecked (1307.4/2614.9)"
            ),
            link_gb_s=448,
        ),
        _row(
            "NVIDIA RTX 3090",
            24,
            936,
            71,
            (
                "triteia specs.py (24 GB, 936.2 GB/s); 71 TFLOP/s fp16 tensor with fp32 accumulate from "
                "NVIDIA's GA102 white paper, not rechecked"
            ),
            sure="medium",
            note="142 with fp16 accumulate; 35.6 without tensor cores",
        ),
        _row(
            "NVIDIA RTX 4090",
            24,
            1008,
            165.2,
            "hmc-tech.com (FP16-32 165.2, FP8-32 330.3, 1.01 TB/s); LLMServingSim config 1008 GB/s",
            note="330.3 with fp16 accumulate; the sparse figures are twice these",
        ),
        _row(
            "NVIDIA RTX 5090",
            32,
            1792,
            209.5,
            (
                "web pages (32 GB, 1792 GB/s, 838 FP16 sparse with fp16 accumulate = 209.5 dense with fp32 "
                "accumulate)"
            ),
            sure="medium",
            note="dense figures derived: 838/4 and 3352/8",
        ),
        _row(
            "Apple M1",
            16,
            68,
            2.6,
            "akunu book M1 table (68 GB/s, FP32 2.6)",
            kind="soc",
            sure="medium",
            note=_APPLE,
        ),
        _row("Apple M1 Max", 64, 400, 10.4, "akunu book M1 table", kind="soc", sure="medium", note=_APPLE),
        _row(
            "Apple M2 Ultra",
            192,
            800,
            27.2,
            "Sidekick GPU.swift (27.2); 800 GB/s from web pages",
            kind="soc",
            sure="medium",
            note=_APPLE,
        ),
        _row(
            "Apple M3 Max (40-core GPU)",
            128,
            400,
            14.3,
            "hmc-tech.com (14.32; Sidekick GPU.swift says 16.2); 400 GB/s, not rechecked",
            kind="soc",
            sure="medium",
            note=_APPLE,
        ),
        _row(
            "Apple M4 Max (40-core GPU)",
            128,
            546,
            18.4,
            "web pages (546 GB/s, 128 GB); 18.4, not rechecked",
            kind="soc",
            sure="medium",
            note=_APPLE,
        ),
        _row(
            "Apple M3 Ultra (80-core GPU)",
            512,
            819,
            28.2,
            "819 GB/s and 512 GB not rechecked against Apple's notes",
            kind="soc",
            sure="low",
            note=_APPLE,
        ),
        _row(
            "AMD EPYC 9654 (96 cores, 12x DDR5-4800)",
            768,
            460.8,
            14.7,
            (
                "460.8 GB/s: the same memory system (EPYC 9754, 12x DDR5-4800); rate computed: 96 cores x 64 "
                "bf16 flop/cycle x 2.4 GHz"
            ),
            kind="cpu",
            sure="low",
            note="memory is a usual fit-out, not a limit; fp32 about 7.4",
        ),
        _row(
            "Intel Xeon Platinum 8480+ (56 cores, AMX)",
            512,
            307,
            230.0,
            "307.2 GB/s = 8x DDR5-4800, computed",
            kind="cpu",
            sure="medium",
            note="AMX on paper: 56 cores x 2048 bf16 operations a cycle x about 2 GHz; far less is sustained",
        ),
        _row(
            "Desktop CPU, dual-channel DDR5-5600",
            64,
            89.6,
            1.0,
            "bandwidth computed: 2 x 8 bytes x 5600 MT/s; rate is a rule of thumb",
            kind="cpu",
            sure="low",
        ),
        _row(
            "Laptop CPU, LPDDR5X-7500 128-bit",
            32,
            120,
            1.0,
            "bandwidth computed: 16 bytes x 7500 MT/s; rate is a rule of thumb",
            kind="cpu",
            sure="low",
        ),
    )
}

_ALIASES = {
    "t4": "NVIDIA T4",
    "v100": "NVIDIA V100 SXM2 32GB",
    "a10g": "NVIDIA A10G",
    "a10": "NVIDIA A10",
    "l4": "NVIDIA L4",
    "l40s": "NVIDIA L40S",
    "a30": "NVIDIA A30",
    "a40": "NVIDIA A40",
    "a100": "NVIDIA A100 80GB SXM",
    "a100-80gb": "NVIDIA A100 80GB SXM",
    "a100-40gb": "NVIDIA A100 40GB SXM",
    "a100-pcie": "NVIDIA A100 80GB PCIe",
    "h100": "NVIDIA H100 SXM",
    "h100-pcie": "NVIDIA H100 PCIe",
    "h200": "NVIDIA H200 SXM",
    "b200": "NVIDIA B200 SXM",
    "b300": "NVIDIA B300 SXM",
    "gb200": "NVIDIA GB200 (one GPU)",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell (server)",
    "b60": "Intel Arc Pro B60",
    "mi300x": "AMD Instinct MI300X",
    "3090": "NVIDIA RTX 3090",
    "4090": "NVIDIA RTX 4090",
    "5090": "NVIDIA RTX 5090",
    "m1": "Apple M1",
    "m1-max": "Apple M1 Max",
    "m2-ultra": "Apple M2 Ultra",
    "m3-max": "Apple M3 Max (40-core GPU)",
    "m4-max": "Apple M4 Max (40-core GPU)",
    "m3-ultra": "Apple M3 Ultra (80-core GPU)",
    "epyc-9654": "AMD EPYC 9654 (96 cores, 12x DDR5-4800)",
    "xeon-8480": "Intel Xeon Platinum 8480+ (56 cores, AMX)",
    "desktop": "Desktop CPU, dual-channel DDR5-5600",
    "laptop": "Laptop CPU, LPDDR5X-7500 128-bit",
}


def _key(name: str) -> str:
    """Lower case, words joined by `-`, the maker and `SXM` (the usual form of a board) left out."""
    words = re.findall(r"[a-z0-9+.]+", name.lower())
    return "-".join(
        w
        for w in words
        if w
        not in (
            "nvidia",
            "amd",
            "intel",
            "apple",
            "instinct",
            "geforce",
            "rtx",
            "tesla",
            "sxm",
            "sxm2",
            "sxm4",
            "sxm5",
        )
    )


_BY_KEY = {**{_key(n): n for n in DEVICES}, **{_key(a): n for a, n in _ALIASES.items()}}


def get(name: str) -> DeviceSpec:
    """The device called `name`, in full or short (`h100`, `A100 PCIe`, `rtx 4090`).

    Raises ConfigError with the nearest names.
    """
    found = DEVICES.get(name) or DEVICES.get(_BY_KEY.get(_key(name), ""))
    if found is not None:
        return found
    near = list(
        dict.fromkeys(_BY_KEY[k] for k in difflib.get_close_matches(_key(name), _BY_KEY, n=4, cutoff=0.4))
    )
    raise ConfigError(
        f"unknown device {name!r}; "
        + (f"nearest: {', '.join(near)}" if near else f"known: {', '.join(DEVICES)}")
    )
