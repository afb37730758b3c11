"""Commands about what is here: models and their plan, the machine's peaks, `doctor`, recordings to conform
to, and the servers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cbviz.cli.options import DEFAULT_MODEL, Json, Model
from cbviz.cli.terminal import Bar, known_errors, plain_errors, print_json
from cbviz.config import ConfigError

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Port; by default a free one from 8866 on.", show_default=False),
]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Don't open a browser.")]

Token = Annotated[
    str | None,
    typer.Option(
        envvar="CBVIZ_TOKEN",
        show_envvar=False,
        show_default=False,
        help=(
            "The token in the link, to choose one for a class; by default a new one. Also $CBVIZ_TOKEN, "
            "which other users of the machine cannot read."
        ),
    ),
]


@plain_errors
def explore(
    scenario: Annotated[
        str | None, typer.Option(help="A preset or a file of requests to begin with.")
    ] = None,
    model: Model = None,
    light: Annotated[
        bool,
        typer.Option(
            "--light",
            help="Recorded tokens of the real model instead of the model itself: no torch, little memory.",
        ),
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help=(
                "A box on the page for a policy of one's own. Its Python runs on this machine, with your "
                "rights."
            ),
        ),
    ] = False,
    host: Host = "127.0.0.1",
    port: Port = None,
    no_browser: NoBrowser = False,
    token: Token = None,
    no_token: Annotated[
        bool,
        typer.Option("--no-token", help="Ask for no token: on this machine alone, without --allow-code."),
    ] = False,
    base_url: Annotated[
        str,
        typer.Option(
            help=(
                "Where a proxy shows the server: a path (/class/) or a whole address "
                "(https://uni.example/class/)."
            )
        ),
    ] = "/",
    max_pages: Annotated[
        int | None,
        typer.Option(
            show_default=False, help="The most pages at a time; by default what the free memory holds."
        ),
    ] = None,
) -> None:
    """The explorer as a dashboard in the browser."""
    from cbviz import recordings
    from cbviz.app import serve
    from cbviz.workload import check

    if light and model is not None:
        raise ConfigError("--light and --model are given both: light mode has no model, choose one")
    if no_token and token:
        raise ConfigError("--no-token and --token are given both: choose one")
    model = "tape" if light else model
    if model == "tape" and scenario is not None:
        recordings.check(scenario)
    if scenario is not None:
        check(scenario)
    raise SystemExit(
        serve.explore(
            scenario,
            model,
            allow_code=allow_code,
            host=host,
            port=port,
            browser=not no_browser,
            token="" if no_token else token or None,
            base_url=base_url,
            max_pages=max_pages,
        )
    )


@plain_errors
def lab(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder to open instead of the notebooks.", show_default=False)
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = None,
    no_browser: NoBrowser = False,
) -> None:
    """JupyterLab on the notebooks."""
    from cbviz.app import serve

    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    raise SystemExit(serve.lab(host=host, port=port, browser=not no_browser, folder=folder))


@plain_errors
def conform(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Recordings of vLLM, or folders of them.")
    ],
    as_json: Json = False,
) -> None:
    """Replay recordings of vLLM's scheduler and compare every key of every step.

    Exit code 0 only if all are equal.
    """
    from cbviz import conform as judge

    at = ""
    with Bar("replaying") as bar:

        def tell(done: int, total: int, name: str = "") -> None:
            nonlocal at
            at = name
            bar.update(done, total, note=name)

        try:
            outcomes = judge.conform(list(paths), tell)
        except Exception as e:  # a recording can be wrong in more ways than can be listed
            if isinstance(e, known_errors()) and not isinstance(e, MemoryError):
                raise
            raise ConfigError(
                f"{at or paths[0]} is not a recording that can be replayed: {type(e).__name__}: "
                f"{str(e)[:200]}"
            ) from e
    played = [o for o in outcomes if not o.skipped]
    skipped = [o for o in outcomes if o.skipped]
    equal = [o for o in played if o.equal]
    if not outcomes:
        raise ConfigError(f"no recording in {', '.join(map(str, paths))}")
    if as_json:
        print_json(
            {
                "equal": len(equal),
                "total": len(played),
                "scenarios": [
                    {k: v for k, v in dataclasses.asdict(o).items() if k != "skipped"} for o in played
                ],
                "skipped": [{"name": o.name, "why": o.skipped} for o in skipped],
            }
        )
    else:
        for o in played:
            if not o.equal:
                print(
                    f"{o.name}: step {o.step}, {o.key}\n  ours    {_clipped(o.ours)}\n  theirs  "
                    f"{_clipped(o.theirs)}"
                )
        print(
            f"{len(equal)} of {len(played)} scenarios equal"
            + (f", {sum(o.steps for o in equal):,} steps" if equal else "")
        )
        for why in dict.fromkeys(o.skipped for o in skipped):
            names = [o.name for o in skipped if o.skipped == why]
            print(f"{len(names)} skipped, {why}: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
    if not played or len(equal) < len(played):
        raise SystemExit(1)


def _clipped(value: Any, most: int = 400) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= most else text[:most] + f" ... ({len(text):,} characters; --json has all)"


@plain_errors
def calibrate(
    device: Annotated[
        str, typer.Option(help="cpu; cuda: the accelerator that torch sees; auto: that if there is one.")
    ] = "cpu",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget earlier measurements; by default the best so far counts.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine's memory bandwidth and arithmetic, and keep the figures in the cache: what
    utilisation is told against.
    """
    from cbviz.cost import calibrate as gauge

    with Bar("measuring", 1.0) as bar:
        tell = lambda share, text: bar.update(share, note=text)  # noqa: E731
        found = None
        if device != "cpu":
            from cbviz.model import device_peaks
            from cbviz.runners.torch_runner import pick_device

            found = pick_device(device)
        if found is None or found.type == "cpu":
            name, d = gauge.cpu_name(), gauge.measure(tell, fresh=fresh)
        else:
            name = device_peaks.name_of(found)
            d = gauge.keep(device_peaks.measure(found, progress=tell), name, 0, fresh=fresh)
    kept = gauge.file_of(name)
    read = gauge.load(name, None if name == gauge.cpu_name() else 0)
    is_kept = read is not None and read.source == d.source  # else an older file stands there, or none
    if as_json:
        print_json({**dataclasses.asdict(d), "file": str(kept) if is_kept else None})
        return
    print(d.name)
    print(f"memory bandwidth    {d.bandwidth_bytes_s / 1e9:>8,.1f} GB/s     measured")
    print(
        f"{'float32' if d.kind == 'cpu' else '16-bit'} arithmetic  {d.flops_s / 1e9:>8,.1f} GFLOP/s  measured"
    )
    print(f"memory              {d.memory_bytes / 2**30:>8,.1f} GiB")
    print(f"{d.source}\n{f'kept in {kept}' if is_kept else f'could not be kept in {kept}'}")


@plain_errors
def doctor(as_json: Json = False) -> None:
    """What works on this machine, what each missing thing costs, and what to do about it."""
    from cbviz import doctor as examiner

    with Bar("looking"):
        report = examiner.examine()
    if as_json:
        print_json(report.to_dict())
    else:
        print(report)


@plain_errors
def pull(
    name: Annotated[str, typer.Argument(help="A known model, or a hub id org/name.")] = DEFAULT_MODEL,
) -> None:
    """Fetch weights into the cache and verify them. Does nothing if they are there."""
    from cbviz.model import hub

    with Bar(f"fetching {name}") as bar:
        source = hub.resolve(name, bar.download)
    print(f"{source.title}: {source.path}")


@plain_errors
def list_(as_json: Json = False) -> None:
    """Which models can be pulled, and which are here."""
    from cbviz.model import hub

    models = hub.list_models()
    if as_json:
        print_json(
            {"models": [{**dataclasses.asdict(m), "path": str(m.path) if m.path else None} for m in models]}
        )
        return
    for m in models:
        where = (
            str(m.path)
            if m.path
            else f"not here: cbviz model pull {m.name} (downloads {m.download_bytes / 1e6:,.0f} MB)"
        )
        print(f"{m.name}  {m.title}, {m.license}, {m.file_bytes / 1e6:,.0f} MB  {where}")
    print(
        "A folder with config.json and *.safetensors, a GGUF file, or a hub id org/name can be given to "
        "--model as well."
    )


@plain_errors
def plan(
    model: Annotated[str, typer.Argument(help="A model of the table, e.g. llama-3.1-8b.")],
    device: Annotated[
        str,
        typer.Argument(
            help="A device of the table, e.g. h100, or `here`: this machine's memory and measured peaks."
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of one request, prompt and output. [default: the model's greatest, at most 8192]",
            show_default=False,
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in one KV block.")] = 16,
    utilisation: Annotated[float, typer.Option(help="Share of the memory for weights and KV.")] = 0.9,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="How keys and values are kept: auto, float32, float16, int8, int4.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Does a model fit a device, and how many requests at once.

    Figures are modelled from the tables, not measured.
    """
    from cbviz.config import EngineConfig, as_run
    from cbviz.cost import calibrate as gauge
    from cbviz.cost import devices, models
    from cbviz.cost import plan as planner
    from cbviz.trace.metrics import seconds

    with Bar("measuring this machine"):
        d = (gauge.load() or gauge.measure()) if device == "here" else devices.get(device)
    spec = as_run(models.get(model), EngineConfig(kv_cache_dtype=kv_cache_dtype))
    kinds = models.kv_variants(spec)
    p = planner.plan(spec, d, context=context, block_size=block_size, utilisation=utilisation)
    if as_json:
        print_json(
            {
                **dataclasses.asdict(p),
                "fits": p.fits,
                "kv_bytes_per_token_as": kinds,
                "source": "modelled",
                "model_source": spec.source,
                "device_source": d.source,
            }
        )
        return
    gib = 2**30
    print(f"{p.model} on {p.device}  (modelled from the tables, not measured)")
    print(
        f"memory         {p.memory_bytes / gib:>10,.1f} GiB     {100 * utilisation:.0f} % of it usable: "
        f"{p.usable_bytes / gib:,.1f} GiB"
    )
    print(f"weights        {p.weight_bytes / gib:>10,.1f} GiB")
    print(
        f"KV cache       {p.kv_bytes / gib:>10,.1f} GiB     {p.kv_bytes_per_token / 1024:,.1f} KiB a token "
        "over all layers"
    )
    if len(kinds) > 1:
        told = ", ".join(
            f"{k.upper()} {v / 1024:,.1f}" + (" (this model)" if k == spec.attention else "")
            for k, v in kinds.items()
        )
        print(f"               {'':>10}         KiB a token if the same heads were cached as {told}")
    print(
        f"blocks         {p.num_blocks:>10,}         of {p.block_size} tokens, "
        f"{p.num_blocks * p.block_size:,} tokens"
    )
    print(
        f"concurrency    {p.max_concurrency:>10,}         requests of {p.context:,} tokens "
        f"({p.kv_bytes_per_request / gib:,.2f} GiB each)"
    )
    if p.decode_s is not None:
        print(
            f"a decode step  {seconds(p.decode_s):>10}         at least, with that many requests at full "
            f"context ({p.max_concurrency / p.decode_s:,.0f} tokens/s at most)"
        )
    elif not p.kv_bytes:
        print("the weights alone do not fit: quantise them, or take several devices")
    else:
        print(
            f"not one request of {p.context:,} tokens fits beside the weights: lower --context or take a "
            "larger device"
        )
    print(
        "Left out: activations, graphs and the runtime's own memory (the share that is not usable), and "
        "anything split over several devices."
    )
