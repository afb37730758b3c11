"""Commands that measure: against other people's software where it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cbviz.cli.options import Json
from cbviz.cli.terminal import Bar, plain_errors, print_json

VllmPython = Annotated[str | None, typer.Option(help="A Python that has vLLM; by default this one, if it has.", show_default=False)]


def everything(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        scheduler()


@plain_errors
def scheduler(vllm_python: VllmPython = None, as_json: Json = False) -> None:
    """What a step's scheduling costs, ours and vLLM's own in turn."""
    from cbviz.bench import scheduler as bench

    with Bar("measuring") as bar:
        result = bench.run(vllm_python, bar.update)
    if as_json:
        print_json(result)
    else:
        print(bench.table(result))


@plain_errors
def record(
    folder: Annotated[Path, typer.Argument(help="Where the recordings go.")],
    count: Annotated[int, typer.Option(min=1, max=100_000, help="Random scenarios.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="The first scenario's seed.")] = 0,
    vllm_python: VllmPython = None,
) -> None:
    """Record vLLM's own scheduler on random scenarios; `cbviz conform FOLDER` then holds ours against it."""
    from cbviz.bench.record import record as play

    with Bar("recording") as bar:
        version = play(folder, count, seed, vllm_python, bar.update)
    print(f"{count} scenarios of vLLM {version} in {folder}; replay them with: cbviz conform {folder}")
