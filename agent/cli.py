"""The command `autotune`. Each command parses to a config and calls one function."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kvpilot.agent import extras
from kvpilot.agent.commands import bench, evaluate, operator, replay, run, trace, train, tune
from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.errors import ConfigError, KVPilotError

ENGINE = EngineConfig()  # defaults are shown from here: they live in one place

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Serve a model from a quantized, paged KV cache, and tune that cache while it serves.

    New here? Watch it work, about 4 minutes on two cores:

        autotune demo

    By hand, in three terminals:

        autotune serve

        autotune knobs set kv_level=1

        autotune run --mode auto
    """,
)
knobs_app = typer.Typer(no_args_is_help=True, help="Read and write the four live knobs of a running engine.")
app.add_typer(knobs_app, name="knobs")
app.add_typer(trace.app, name="trace")
app.add_typer(bench.app, name="bench")
run.register(app)
replay.register(app)
operator.register(app)
tune.register(app)
evaluate.register(app)
train.register(app)

SETTINGS = {  # what errors call by its name in the configuration, and the option
    "pool_bytes": "pool-mb",
    "ttl_seconds": "ttl",
    "fraction": "sample",
    "interval_seconds": "interval",
    "decision_seconds": "decision",
    "slo.ttft_p99_seconds": "slo-ttft",
    "slo.inter_token_p99_seconds": "slo-itl",
    "guard.min_change_seconds": "min-change-seconds",
    "prometheus.url": "prometheus-url",
    "counterfactual.trace": "counterfactual",
    "timeout_seconds": "timeout",
    "fit_only": "fit-only",
    "health_port": "health-port",
    **{
        name: name.replace("_", "-")
        for name in (
            *("page_size", "ladder", "max_batch", "max_batch_ceiling", "max_model_len", "max_waiting"),
            *(
                "prefill_chunk",
                "eviction",
                "starvation_seconds",
                "size_factor",
                "kv_level",
                "port",
                "admin_port",
            ),
            *(
                "threads",
                "dtype",
                "config",
                "state",
                "listen",
                "mode",
                "policy",
                "outside",
                "source",
                "target",
                "selector",
                "kill_file",
                "control_file",
                "pod_name",
                "log_format",
                "token_file",
                "url",
                "admin_url",
                "audit",
            ),
        )
    },
}
DEFAULT_TOKEN_FILE = Path("~/.kvpilot/admin.token")  # of serve, run and knobs alike
TokenFile = Annotated[Path, Option("--token-file", help="Holds the admin token of `autotune serve`.")]
AdminUrl = Annotated[str, Option("--admin-url", help="The engine's admin API.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autotune {version('kvpilot')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    model: Annotated[
        str,
        Option(help="`smollm2` (embedded, fetched once), a GGUF file, a folder of safetensors, or a hub id."),
    ] = "smollm2",
    host: Annotated[str, Option(help="Where the OpenAI API listens.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    admin_port: Annotated[
        int, Option(min=0, max=65535, help="Of the admin API, on loopback; 0 takes a free one.")
    ] = 8001,
    admin_token_file: Annotated[
        Path, Option(help="Holds the admin token; created if missing.")
    ] = DEFAULT_TOKEN_FILE,
    dtype: Annotated[str, Option(help="Compute type: auto, bf16 or fp32.")] = "auto",
    device: Annotated[str, Option(help="cpu, or cuda: an NVIDIA GPU, with triton installed.")] = "cpu",
    load_format: Annotated[
        str, Option(help="auto, or dummy: random weights in the model's shape, for benchmarks.")
    ] = "auto",
    threads: Annotated[int | None, Option(min=1, help="CPU threads. [default: all cores]")] = None,
    record: Annotated[
        Path | None,
        Option(help="Append a trace of the requests: lengths, hashes and times, never text."),
    ] = None,
    pool_mb: Annotated[
        int, Option(min=1, help="KV pool in MiB, scales included.", rich_help_panel="Envelope")
    ] = ENGINE.pool_bytes >> 20,
    pool_bytes: Annotated[
        int | None, Option(min=1, help="The same in bytes; wins over --pool-mb.", rich_help_panel="Envelope")
    ] = None,
    page_size: Annotated[int, Option(help="Tokens per page.", rich_help_panel="Envelope")] = ENGINE.page_size,
    ladder: Annotated[
        str, Option(help="Precisions of a page, from full down.", rich_help_panel="Envelope")
    ] = ",".join(ENGINE.ladder),
    max_batch_ceiling: Annotated[
        int, Option(help="Largest value of the knob max_batch.", rich_help_panel="Envelope")
    ] = ENGINE.max_batch_ceiling,
    max_model_len: Annotated[
        int | None,
        Option(
            help="Tokens of prompt + output. [default: what model and pool allow]", rich_help_panel="Envelope"
        ),
    ] = None,
    max_waiting: Annotated[
        int, Option(help="Queue length; beyond it 429 with Retry-After.", rich_help_panel="Envelope")
    ] = ENGINE.max_waiting,
    prefill_chunk: Annotated[
        int, Option(help="Prompt tokens per step, over all requests.", rich_help_panel="Envelope")
    ] = ENGINE.prefill_chunk,
    eviction: Annotated[str, Option(help="lru or hazard.", rich_help_panel="Envelope")] = ENGINE.eviction,
    starvation_seconds: Annotated[
        float, Option(help="A request that waits longer goes first.", rich_help_panel="Envelope")
    ] = ENGINE.starvation_seconds,
    ttl: Annotated[
        float,
        Option(help="ttl_seconds: how long idle pages are protected.", rich_help_panel="Knobs at start"),
    ] = ENGINE.knobs.ttl_seconds,
    size_factor: Annotated[
        float, Option(help="Largest share of the pool they may hold.", rich_help_panel="Knobs at start")
    ] = ENGINE.knobs.size_factor,
    max_batch: Annotated[
        int, Option(help="Requests admitted together.", rich_help_panel="Knobs at start")
    ] = ENGINE.knobs.max_batch,
    kv_level: Annotated[
        int, Option(help="Lowest rung of the ladder in use.", rich_help_panel="Knobs at start")
    ] = ENGINE.knobs.kv_level,
) -> None:
    """Serve a model: OpenAI API, /metrics, and the admin API with the live knobs.

    The *envelope* is fixed at start, the *knobs* change while it serves (`autotune knobs`, `autotune run`).

        autotune serve

        autotune serve --model ./Qwen3-0.6B --pool-mb 1024 --eviction hazard

        curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
          -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]}'
    """
    from kvpilot.agent.serve import ServeConfig, run_server

    engine = EngineConfig(
        pool_bytes=pool_bytes or pool_mb << 20,
        page_size=page_size,
        ladder=tuple(part.strip() for part in ladder.split(",")),
        max_batch_ceiling=max_batch_ceiling,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
        prefill_chunk=prefill_chunk,
        eviction=eviction,
        starvation_seconds=starvation_seconds,
        knobs=Knobs(ttl_seconds=ttl, size_factor=size_factor, max_batch=max_batch, kv_level=kv_level),
    )
    config = ServeConfig(
        model=model,
        host=host,
        port=port,
        admin_port=admin_port,
        admin_token_file=admin_token_file.expanduser(),
        dtype=dtype,
        device=device,
        load_format=load_format,
        threads=threads,
        record=record,
        engine=engine,
    )
    raise typer.Exit(run_server(config))


@app.command()
def demo(
    model: Annotated[str, Option(help="As for `autotune serve`.")] = "smollm2",
    out: Annotated[Path, Option(help="Folder for report.html, run.json, audit and logs.")] = Path(
        "runs/demo"
    ),
    seconds_per_phase: Annotated[float, Option(help="There are five phases, twice.")] = 15.0,
    quick: Annotated[
        bool, Option("--quick", help="The same in about a minute, too short to judge by.")
    ] = False,
    pool_mb: Annotated[int, Option(help="KV pool in MiB: small, so that memory decides.")] = 48,
    seed: Annotated[int, Option(help="Of the traffic.")] = 1,
) -> None:
    """Show the loop on a real model: the same chats with static knobs, then tuned, and a report of both.

    Takes about 4 minutes on two cores. Ctrl-C leaves a report of what was measured until then.

        autotune demo

        autotune demo --quick --out /tmp/demo
    """
    from kvpilot.agent.demo.command import DemoConfig, run_demo

    seconds = 4.0 if quick else seconds_per_phase
    config = DemoConfig(model=model, out=out, seconds_per_phase=seconds, pool_mb=pool_mb, seed=seed)
    raise typer.Exit(run_demo(config))


@knobs_app.command("get")
def knobs_get(
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    admin_url: AdminUrl = "http://127.0.0.1:8001",
    as_json: Annotated[bool, Option("--json", help="For machines.")] = False,
) -> None:
    """Show the knobs, their bounds and the revision.

    autotune knobs get
    """
    from kvpilot.agent.knobs import get_knobs

    get_knobs(admin_url, token_file.expanduser(), as_json=as_json)


@knobs_app.command("set")
def knobs_set(
    settings: Annotated[
        list[str], typer.Argument(metavar="KNOB=VALUE...", help="e.g. max_batch=8 kv_level=1")
    ],
    token_file: TokenFile = DEFAULT_TOKEN_FILE,
    admin_url: AdminUrl = "http://127.0.0.1:8001",
    expected_revision: Annotated[
        int | None, Option(help="Refuse if the knobs have changed since this revision.")
    ] = None,
) -> None:
    """Change knobs, all or none; each takes effect at the next scheduler step.

    autotune knobs set max_batch=8 kv_level=1
    """
    from kvpilot.agent.knobs import set_knobs

    set_knobs(admin_url, token_file.expanduser(), _parse_settings(settings), expected_revision)


def _parse_settings(settings: list[str]) -> dict[str, object]:
    changes: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name in changes:
            raise ConfigError(f"{setting!r} is invalid: expected KNOB=VALUE, each knob once")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            raise ConfigError(f"{name}={value!r} is invalid: expected a number") from None
    return changes


def main() -> None:
    """Errors that a user can cause are one line on stderr and exit code 1, for wrong usage 2."""
    try:
        app()
    except KVPilotError as error:
        print(f"autotune: {_in_options(str(error))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvpilot"):
            raise
        print(f"autotune: {extras.missing_package(error.name, sys.argv[1:])}", file=sys.stderr)
        sys.exit(1)


def _in_options(message: str) -> str:
    """A message that begins with a setting's name, with the option that sets it."""
    match = re.match(r"(?:knobs\.)?([\w.]+)=", message)
    if match is None or match[1] not in SETTINGS:
        return message
    return f"--{SETTINGS[match[1]]}: {message}"


if __name__ == "__main__":
    main()
