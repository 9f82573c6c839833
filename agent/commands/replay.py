"""`autotune replay`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from kvpilot.agent.commands.given import given_flags
from kvpilot.agent.commands.replay_options import (
    DEFAULT_PROFILE,
    Eviction,
    FileFormat,
    KvLevel,
    MaxBatch,
    MaxTokens,
    PageSize,
    PoolMb,
    Profile,
    Sample,
    Seconds,
    Seed,
    SessionRate,
    SizeFactor,
    SloItl,
    SloTtft,
    Starvation,
    Ttl,
    Users,
    check_numbers,
)
from kvpilot.engine.errors import ConfigError

SERVER = "Against a server"


def register(app: typer.Typer) -> None:
    app.command()(replay)


# Long: a parameter per flag.
def replay(
    context: typer.Context,
    files: Annotated[
        list[Path],
        Argument(metavar="TRACE | --compare RESULT.json...", help="A trace; with --compare, results."),
    ],
    on: Annotated[str, Option(help="sim, or the URL of an OpenAI-compatible server.")] = "sim",
    out: Annotated[
        Path | None,
        Option(
            "--out",
            "-o",
            help="The result as JSON, the page beside it as .html; with --compare, the page. "
            "[default: replay.json; compared.html]",
        ),
    ] = None,
    compare: Annotated[bool, Option("--compare", help="Put results side by side.")] = False,
    slo_ttft: SloTtft = 5.0,
    slo_itl: SloItl = 0.1,
    window: Annotated[
        float | None, Option(help="Seconds per point of the time series. [default: a 120th of the trace]")
    ] = None,
    sample: Sample = 1.0,
    seed: Seed = 0,
    users: Users = None,
    seconds: Seconds = None,
    max_tokens: MaxTokens = None,
    file_format: FileFormat = "auto",
    session_rate: SessionRate = 1 / 60,
    profile: Profile = DEFAULT_PROFILE,
    pool_mb: PoolMb = None,
    page_size: PageSize = None,
    eviction: Eviction = "lru",
    starvation_seconds: Starvation = 300.0,
    ttl: Ttl = 0.0,
    size_factor: SizeFactor = 0.0,
    max_batch: MaxBatch = None,
    kv_level: KvLevel = 0,
    model: Annotated[str, Option(help="Model name to ask for.", rich_help_panel=SERVER)] = "smollm2",
    prompts: Annotated[
        str, Option(help="ids (token ids), words, or auto: what it takes.", rich_help_panel=SERVER)
    ] = "auto",
    vocab_size: Annotated[
        int, Option(min=2, help="Token ids are drawn below.", rich_help_panel=SERVER)
    ] = 30_000,
    drain: Annotated[
        float, Option(help="Seconds to wait for the last answers.", rich_help_panel=SERVER)
    ] = 60.0,
) -> None:
    """Replay recorded traffic, simulated in seconds or against a server in real time.

    Ctrl-C writes what there is.

        autotune replay conversation.jsonl --sample 0.125

        autotune replay conversation.jsonl --sample 0.125 --kv-level 2 --out int4.json

        autotune replay --compare replay.json int4.json --out compared.html

        autotune replay chats.parquet --on http://127.0.0.1:8000
    """
    from kvpilot.agent.simulate.replay import ReplayConfig, run_compare, run_replay
    from kvpilot.agent.simulate.setup import Envelope, Requests
    from kvpilot.env.replay.limits import check_number
    from kvpilot.env.replay.result import Slo

    if compare:
        given = given_flags(context, but=("files", "out", "compare"))
        if given:  # they say how to replay, and --compare replays nothing
            raise ConfigError(f"{', '.join(given)} with --compare: expected only results and --out")
        raise typer.Exit(run_compare(files, out or Path("compared.html")))
    if len(files) != 1:
        raise ConfigError(
            f"{len(files)} traces are invalid: expected one (`autotune trace compose` joins several)"
        )
    check_number(drain, name="--drain", low=0.0)
    check_numbers(sample=sample, session_rate=session_rate, seconds=seconds)
    if window is not None:
        check_number(window, name="--window", above=0.0)
    config = ReplayConfig(
        requests=Requests(
            file=files[0],
            format=file_format,
            sessions_per_second=session_rate,
            sample=sample,
            seed=seed,
            max_tokens=max_tokens,
        ),
        on=on,
        out=out or Path("replay.json"),
        slo=Slo(ttft_seconds=slo_ttft, inter_token_seconds=slo_itl),
        window_seconds=window,
        users=users,
        end_seconds=seconds if seconds is not None else float("inf"),
        profile=profile,
        envelope=Envelope(
            pool_mb=pool_mb,
            page_size=page_size,
            eviction=eviction,
            starvation_seconds=starvation_seconds,
            ttl_seconds=ttl,
            size_factor=size_factor,
            max_batch=max_batch,
            kv_level=kv_level,
        ),
        model=model,
        prompts=prompts,
        vocab_size=vocab_size,
        drain_seconds=drain,
    )
    raise typer.Exit(run_replay(config))
