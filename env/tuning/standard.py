"""The workloads that policies are trained and judged on. Their loads fit the profile h200-llama3-8b and 40 GB of pool.

Every one is a composition: sessions and their reuse are recorded, how many there are at a time is not. The engine
keeps up with `few` and `some` coders at full or 8-bit precision; with `many` the cache of those who are about to
return fits at 4 bits only, with `most` not even then.
"""

from dataclasses import dataclass
from pathlib import Path

from kvpilot.env.slo import Slo
from kvpilot.env.traces.trace import TraceError
from kvpilot.env.tuning.workload import RANDOM, Range, Regime, StreamSpec, Workload

CONVERSATION = "mooncake/conversation_first40min.jsonl"
AGENTIC = "weka_agentic/sessions_train.tar.xz"
RATES = "servegen/servegen_rate_traces.tar.xz"
RATES_CLIENT = "language/m-large"

POOL_BYTES = 40_000_000_000
SLO = Slo(ttft_seconds=10.0, inter_token_seconds=0.2)

FEW, SOME, MANY, MOST = (3, 5), (7, 11), (20, 26), (28, 36)  # coders at a time
LONG, SHORT, TWO_HOURS = (1200, 2400), (400, 800), (7200, 7200)  # seconds


def _regime(seconds: Range, **levels: Range) -> Regime:
    return Regime(seconds=seconds, levels=levels)


@dataclass(frozen=True, kw_only=True)
class _Family:
    """`streams` are names of a regime's streams -> which of the streams that `standard_workloads` makes."""

    streams: dict[str, str]
    regimes: dict[str, Regime]
    order: tuple[str, ...] | str = RANDOM
    seconds: Range = TWO_HOURS


RANDOM_COMPOSITION = "random_composition"
FAMILIES = {
    "agentic_drift": _Family(
        streams={"coders": "coders"},
        regimes={
            "quiet": _regime(LONG, coders=FEW),
            "day": _regime(LONG, coders=SOME),
            "busy": _regime(LONG, coders=MANY),
            "peak": _regime(LONG, coders=MOST),
        },
    ),
    "conversation_modulated": _Family(
        streams={"chat": "waves"}, regimes={"chat": _regime(TWO_HOURS, chat=(0.3, 0.5))}
    ),
    "switch": _Family(
        streams={"chat": "chat", "coders": "coders"},
        regimes={
            "conversation": _regime((2000, 2800), chat=(0.3, 0.6)),
            "agentic": _regime((2000, 2800), coders=MANY),
        },
        order=("conversation", "agentic"),
    ),
    "bursts": _Family(
        streams={"coders": "coders", "batch": "batch"},
        regimes={
            "calm": _regime((900, 1500), coders=SOME),
            "burst": _regime(SHORT, coders=SOME, batch=(0.4, 0.8)),
        },
        order=("calm", "burst"),
    ),
    "stationary": _Family(streams={"coders": "coders"}, regimes={"steady": _regime(TWO_HOURS, coders=MANY)}),
    RANDOM_COMPOSITION: _Family(
        streams={"chat": "chat", "coders": "coders", "batch": "batch"},
        regimes={
            "idle": _regime(LONG, coders=FEW),
            "chat": _regime(LONG, chat=(0.3, 0.7)),
            "coding": _regime(LONG, coders=SOME),
            "busy": _regime(LONG, coders=MANY),
            "peak": _regime(LONG, coders=MOST),
            "batch": _regime((400, 900), coders=SOME, batch=(0.4, 0.8)),
        },
        seconds=(7200, 14400),
    ),
}
NAMED = tuple(name for name in FAMILIES if name != RANDOM_COMPOSITION)


def standard_workloads(
    folder: Path | str,
    *,
    split: str = "train",
    conversation: str = CONVERSATION,
    agentic: str = AGENTIC,
    rates: str = RATES,
    rates_client: str = RATES_CLIENT,
) -> dict[str, Workload]:
    """By name; the files are relative to `folder`. Raises TraceError where one is missing."""
    for file in (conversation, agentic, rates):
        if not (Path(folder) / file).is_file():
            raise TraceError(f"folder={str(folder)!r} is invalid: it holds no {file}")
    streams = {
        "chat": StreamSpec(file=conversation, loop="open"),
        "waves": StreamSpec(file=conversation, loop="open", curve_file=rates, curve_client=rates_client),
        "coders": StreamSpec(file=agentic, loop="closed"),
        "batch": StreamSpec(file=conversation, loop="one-off"),
    }
    return {
        name: Workload(
            name=name,
            folder=str(folder),
            split=split,
            streams={stream: streams[made] for stream, made in family.streams.items()},
            regimes=family.regimes,
            order=family.order,
            seconds=family.seconds,
            slo=SLO,
            pool_bytes=POOL_BYTES,
        )
        for name, family in FAMILIES.items()
    }
