"""`autotune sensitivity`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kvpilot.agent.commands.replay_options import (
    DEFAULT_PROFILE,
    Eviction,
    FileFormat,
    MaxTokens,
    PageSize,
    PoolMb,
    Profile,
    Sample,
    Seconds,
    Seed,
    SessionRate,
    SloItl,
    SloTtft,
    Starvation,
    Users,
    check_numbers,
)
from kvpilot.engine.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command()(sensitivity)


# Long: a parameter per flag.
def sensitivity(
    trace: Annotated[Path, Option(help="The traffic.")],
    out: Annotated[
        Path, Option("--out", "-o", help="The table as JSON; the plots lie beside it as .html.")
    ] = Path("sensitivity.json"),
    at: Annotated[
        str | None,
        Option(
            help="Where the other knobs stand: kv_level=1,max_batch=32. [default: the best of the sweeps]"
        ),
    ] = None,
    rounds: Annotated[int, Option(min=1, help="Sweeps; each starts from the best of the one before.")] = 2,
    quality_weight: Annotated[
        float, Option(help="What a quality loss of 1 nat per token costs in goodput, to find `best`.")
    ] = 100.0,
    processes: Annotated[int, Option(min=1, help="Simulations at once.")] = 2,
    slo_ttft: SloTtft = 5.0,
    slo_itl: SloItl = 0.1,
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
) -> None:
    """Sweep each knob alone in the simulator, and say what it moves.

    The other knobs stand at the best settings found. Ctrl-C shows what there is.

        autotune sensitivity --trace conversation.jsonl --sample 0.125 --pool-mb 40000
    """
    from kvpilot.agent.simulate.sensitivity import SensitivityConfig, run_sensitivity
    from kvpilot.agent.simulate.setup import Envelope, Requests
    from kvpilot.env.replay.compare import check_out
    from kvpilot.env.replay.limits import check_losses, check_number
    from kvpilot.env.replay.result import Slo
    from kvpilot.env.replay.sim import SimReplay
    from kvpilot.env.simulator.latency import load_profile

    check_out(out, ".json")
    check_number(quality_weight, name="--quality-weight", low=0.0)
    check_numbers(sample=sample, session_rate=session_rate, seconds=seconds)
    requests = Requests(
        file=trace,
        format=file_format,
        sessions_per_second=session_rate,
        sample=sample,
        seed=seed,
        max_tokens=max_tokens,
    )
    envelope = Envelope(
        pool_mb=pool_mb, page_size=page_size, eviction=eviction, starvation_seconds=starvation_seconds
    )
    traffic, loaded = requests.read(), load_profile(profile)
    engine = envelope.engine(loaded, traffic)
    replay = SimReplay(
        profile=loaded,
        engine=engine,
        slo=Slo(ttft_seconds=slo_ttft, inter_token_seconds=slo_itl),
        users=users,
        end_seconds=seconds if seconds is not None else float("inf"),
        seed=seed,
    )
    check_losses(replay.quality_loss, engine.ladder, len(engine.ladder) - 1, source=loaded.name)
    config = SensitivityConfig(
        replay=replay,
        out=out,
        at=_parse_knobs(at),
        rounds=rounds,
        quality_weight=quality_weight,
        processes=processes,
    )
    raise typer.Exit(run_sensitivity(traffic, config))


def _parse_knobs(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        raise ConfigError(f"at={text!r} is invalid: expected KNOB=VALUE,KNOB=VALUE") from None
