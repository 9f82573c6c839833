"""The options of `replay` and `sensitivity`: which requests of a trace, on which simulated engine, and which SLO."""

from typing import Annotated

from typer import Option

from kvpilot.engine.kv.eviction import ORACLE, POLICIES

MODELLING, TRAFFIC = "Simulated engine", "Traffic"
DEFAULT_PROFILE = "h200-llama3-8b"

Sample = Annotated[float, Option(help="Share of the sessions to keep.", rich_help_panel=TRAFFIC)]
Seed = Annotated[int, Option(min=0, help="Of all that is drawn.", rich_help_panel=TRAFFIC)]
FileFormat = Annotated[
    str, Option("--format", help="auto, mooncake, agentic, azure, jsonl or parquet.", rich_help_panel=TRAFFIC)
]
SessionRate = Annotated[
    float, Option(help="Agentic archives: session starts per second.", rich_help_panel=TRAFFIC)
]
MaxTokens = Annotated[
    int | None,
    Option(min=1, help="Drop requests with more, prompt and reply together.", rich_help_panel=TRAFFIC),
]
Users = Annotated[
    int | None,
    Option(min=1, help="Closed loop: so many users take the sessions one by one.", rich_help_panel=TRAFFIC),
]
Seconds = Annotated[
    float | None, Option(help="Stop the clock here. [default: the end]", rich_help_panel=TRAFFIC)
]
Profile = Annotated[
    str, Option(help="Latency profile: shipped by name, or a .json file.", rich_help_panel=MODELLING)
]
PoolMb = Annotated[
    int | None, Option(min=1, help="KV pool in MiB. [default: the profile's]", rich_help_panel=MODELLING)
]
PageSize = Annotated[
    int | None,
    Option(min=2, help="Tokens per page. [default: the trace's blocks]", rich_help_panel=MODELLING),
]
Eviction = Annotated[
    str, Option(help=f"{', '.join(POLICIES)}, or {ORACLE}, the oracle.", rich_help_panel=MODELLING)
]
Starvation = Annotated[
    float, Option(help="A request that waits longer goes first.", rich_help_panel=MODELLING)
]
Ttl = Annotated[float, Option(help="Knob ttl_seconds.", rich_help_panel=MODELLING)]
SizeFactor = Annotated[float, Option(help="Knob size_factor.", rich_help_panel=MODELLING)]
MaxBatch = Annotated[
    int | None, Option(min=1, help="Knob max_batch. [default: the profile's]", rich_help_panel=MODELLING)
]
KvLevel = Annotated[int, Option(min=0, help="Knob kv_level.", rich_help_panel=MODELLING)]
SloTtft = Annotated[float, Option(help="A good request has its first token within so many seconds.")]
SloItl = Annotated[float, Option(help="And so many seconds between two tokens, on the mean.")]


def check_numbers(*, sample: float, session_rate: float, seconds: float | None) -> None:
    """What typer's bounds cannot hold: they let nan pass. Raises ConfigError."""
    from kvpilot.env.replay.limits import check_number

    check_number(sample, name="--sample", above=0.0)
    check_number(session_rate, name="--session-rate", above=0.0)
    if seconds is not None:
        check_number(seconds, name="--seconds", above=0.0)
