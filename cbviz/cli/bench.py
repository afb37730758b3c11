"""Commands that measure: against other people's software where it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from cbviz.cli.options import Json
from cbviz.cli.terminal import Bar, plain_errors, print_json
from cbviz.config import ConfigError

VllmPython = Annotated[
    str | None,
    typer.Option(help="A Python that has vLLM; by default this one, if it has.", show_default=False),
]
Model = Annotated[str, typer.Option(help="Model: a registry name, folder, GGUF file or hub id.")]
Precision = Annotated[str, typer.Option(help="exact, fast or int8.")]


def _print(result: dict[str, Any], table: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        print(table(result))


def _known(precisions: Iterable[str]) -> tuple[str, ...]:
    """The precisions asked for. Raises ConfigError."""
    from cbviz.model.matrix import PRECISIONS

    wanted = tuple(precisions) or tuple(PRECISIONS)
    if strange := next((p for p in wanted if p not in PRECISIONS), None):
        raise ConfigError(f"precision is {strange!r}, it must be one of {', '.join(PRECISIONS)}")
    return wanted


def everything(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        scheduler()


@plain_errors
def scheduler(vllm_python: VllmPython = None, as_json: Json = False) -> None:
    """What a step's scheduling costs, ours and vLLM's own in turn."""
    from cbviz.bench import scheduler as bench

    with Bar("measuring") as bar:
        result = bench.run(vllm_python, bar.update)
    _print(result, bench.table, as_json)


@plain_errors
def engine(
    seats: Annotated[int, typer.Option(min=1, max=64, help="Requests that may run at once.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="How often everybody runs, in turn.")] = 3,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Cut every output to this share: a quicker bench.")
    ] = 1.0,
    requests: Annotated[int, typer.Option(min=1, max=200, help="Requests of the article's workload.")] = 20,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="exact, fast or int8; may be given more than once; by default all.", show_default=False
        ),
    ] = None,
    without_transformers: Annotated[
        bool, typer.Option("--without-transformers", help="Leave transformers' generate out.")
    ] = False,
    vllm_python: VllmPython = None,
    llama_python: Annotated[
        str | None, typer.Option(help="A Python that has llama-cpp-python.", show_default=False)
    ] = None,
    decode_rounds: Annotated[
        int,
        typer.Option(
            min=0, max=100, help="Rounds of decode steps alone, ours and llama.cpp's; 0 leaves them out."
        ),
    ] = 5,
    model: Model = "smollm2",
    as_json: Json = False,
) -> None:
    """The whole engine on the article's workload and alone, against transformers, vLLM and llama.cpp in turn."""
    from cbviz.bench import engine as bench

    wanted = _known(precision or ())
    with Bar("measuring") as bar:
        result = bench.run(
            model=model,
            precisions=wanted,
            seats=seats,
            rounds=rounds,
            share=share,
            num_requests=requests,
            vllm_python=vllm_python,
            llama_python=llama_python,
            with_transformers=not without_transformers,
            decode_rounds=decode_rounds,
            progress=bar.update,
        )
    _print(result, bench.table, as_json)


@plain_errors
def recording(
    precision: Precision = "fast",
    rounds: Annotated[int, typer.Option(min=2, max=200, help="Rounds; what is told are their medians.")] = 12,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps of a round.")] = 8,
    model: Model = "smollm2",
    as_json: Json = False,
) -> None:
    """What recorder and reasons cost a step, on the real model and on the simulator."""
    from cbviz.bench import recording as bench

    _known([precision])
    with Bar("measuring") as bar:
        result = bench.run(model, precision, rounds=rounds, steps=steps, progress=bar.update)
    _print(result, bench.table, as_json)


@plain_errors
def memory(
    precision: Precision = "fast",
    blocks: Annotated[int, typer.Option(min=2, help="KV blocks of 16 tokens in each kernel.")] = 512,
    kernels: Annotated[int, typer.Option(min=1, max=64, help="Kernels at once.")] = 3,
    model: Model = "smollm2",
    as_json: Json = False,
) -> None:
    """What a kernel with the real model takes, alone and with others on the same machine: weights are shared
    pages.
    """
    from cbviz.bench import memory as bench

    _known([precision])
    with Bar("measuring") as bar:
        result = bench.run(model, precision, num_blocks=blocks, kernels=kernels, progress=bar.update)
    _print(result, bench.table, as_json)


@plain_errors
def kernels(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    precision: Precision = "fast",
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How often everybody runs, in turn.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="One setting of each operator.")] = False,
    as_json: Json = False,
) -> None:
    """Each fast operator against plain torch and the reference: time, bytes, share of the memory's bandwidth."""
    from cbviz.bench import kernels as bench

    _known([precision])
    with Bar("measuring") as bar:
        result = bench.run(
            device=device, precision=precision, rounds=rounds, quick=quick, progress=bar.update
        )
    _print(result, bench.table, as_json)


@plain_errors
def record(
    folder: Annotated[Path, typer.Argument(help="Where the recordings go.")],
    count: Annotated[int, typer.Option(min=1, max=100_000, help="Random scenarios.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="The first scenario's seed.")] = 0,
    speculative: Annotated[bool, typer.Option("--speculative", help="With speculative decoding.")] = False,
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics",
            help=(
                "Instead, record vLLM's own metrics after each step of a few fixed workloads "
                "(docs/metrics.md)."
            ),
        ),
    ] = False,
    vllm_python: VllmPython = None,
) -> None:
    """Record vLLM's own scheduler on random scenarios; `cbviz conform FOLDER` then holds ours against it."""
    from cbviz.bench.metrics_record import WORKLOADS, record_metrics
    from cbviz.bench.record import record as play

    if metrics:
        with Bar("recording") as bar:
            version = record_metrics(folder, vllm_python, bar.update)
        print(f"metrics of vLLM {version} on {len(WORKLOADS)} workloads in {folder}")
        return
    with Bar("recording") as bar:
        version = play(folder, count, seed, vllm_python, bar.update, speculative)
    print(f"{count} scenarios of vLLM {version} in {folder}; replay them with: cbviz conform {folder}")


@plain_errors
def techniques(
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="One technique; may be given more than once; by default all.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The least that shows each point: seconds, and rough figures.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling.")] = 0,
    model: Model = "smollm2",
    as_json: Json = False,
) -> None:
    """What each decoding and KV technique gives and costs on the real engine, and whether what must be equal
    is equal; exit code 1 if it is not.
    """
    from cbviz.bench import techniques as bench

    chosen = bench.pick(only or ())
    with Bar("measuring") as bar:
        result = bench.run(chosen, model=model, seed=seed, quick=quick, progress=bar.update)
    _print(result, bench.table, as_json)
    if not result["holds"]:
        raise SystemExit(1)
