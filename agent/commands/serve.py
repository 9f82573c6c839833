"""`autotune serve`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.kv.eviction import POLICIES
from kvpilot.engine.server.token import DEFAULT_TOKEN_FILE

ENGINE = EngineConfig()  # defaults are shown from here: they live in one place


def register(app: typer.Typer) -> None:
    app.command()(serve)


# Long: a parameter per flag.
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
    eviction: Annotated[
        str, Option(help=f"{' or '.join(POLICIES)}.", rich_help_panel="Envelope")
    ] = ENGINE.eviction,
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
