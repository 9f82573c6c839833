"""The workloads that policies are trained and judged on. Their loads fit the profile h200-llama3-8b and 40 GB of pool.

Every one is a composition: sessions and their reuse are recorded, how many there are at a time is not. The engine
keeps up with `few` and `some` coders at full or 8-bit precision; with `many` the cache of those who are about to
return fits at 4 bits only, with `most` not even then.
"""

from pathlib import Path

from kvpilot.env.slo import Slo
from kvpilot.env.traces.trace import TraceError
from kvpilot.env.tuning.workload import RANDOM, Regime, StreamSpec, Workload

CONVERSATION = "mooncake/conversation_first40min.jsonl"
AGENTIC = "weka_agentic/sessions_train.tar.xz"
RATES = "servegen/servegen_rate_traces.tar.xz"
RATES_CLIENT = "language/m-large"

NAMED = ("agentic_drift", "conversation_modulated", "switch", "bursts", "stationary")
RANDOM_COMPOSITION = "random_composition"

POOL_BYTES = 40_000_000_000
SLO = Slo(ttft_seconds=10.0, inter_token_seconds=0.2)


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
    chat = StreamSpec(file=conversation, loop="open")
    waves = StreamSpec(file=conversation, loop="open", curve_file=rates, curve_client=rates_client)
    coders = StreamSpec(file=agentic, loop="closed")
    batch = StreamSpec(file=conversation, loop="one-off")
    few, some, many, most = (3, 5), (7, 11), (20, 26), (28, 36)

    def workload(name: str, streams: dict, regimes: dict, **options) -> Workload:
        return Workload(
            name=name,
            folder=str(folder),
            split=split,
            streams=streams,
            regimes=regimes,
            slo=SLO,
            pool_bytes=POOL_BYTES,
            **options,
        )

    long, hours = (1200, 2400), {"seconds": (7200, 7200)}
    made = [
        workload(
            "agentic_drift",
            {"coders": coders},
            {
                "quiet": Regime(seconds=long, levels={"coders": few}),
                "day": Regime(seconds=long, levels={"coders": some}),
                "busy": Regime(seconds=long, levels={"coders": many}),
                "peak": Regime(seconds=long, levels={"coders": most}),
            },
            **hours,
        ),
        workload(
            "conversation_modulated",
            {"chat": waves},
            {"chat": Regime(seconds=(7200, 7200), levels={"chat": (0.3, 0.5)})},
            **hours,
        ),
        workload(
            "switch",
            {"chat": chat, "coders": coders},
            {
                "conversation": Regime(seconds=(2000, 2800), levels={"chat": (0.3, 0.6)}),
                "agentic": Regime(seconds=(2000, 2800), levels={"coders": many}),
            },
            order=("conversation", "agentic"),
            **hours,
        ),
        workload(
            "bursts",
            {"coders": coders, "batch": batch},
            {
                "calm": Regime(seconds=(900, 1500), levels={"coders": some}),
                "burst": Regime(seconds=(400, 800), levels={"coders": some, "batch": (0.4, 0.8)}),
            },
            order=("calm", "burst"),
            **hours,
        ),
        workload(
            "stationary",
            {"coders": coders},
            {"steady": Regime(seconds=(7200, 7200), levels={"coders": many})},
            **hours,
        ),
        workload(
            RANDOM_COMPOSITION,
            {"chat": chat, "coders": coders, "batch": batch},
            {
                "idle": Regime(seconds=long, levels={"coders": few}),
                "chat": Regime(seconds=long, levels={"chat": (0.3, 0.7)}),
                "coding": Regime(seconds=long, levels={"coders": some}),
                "busy": Regime(seconds=long, levels={"coders": many}),
                "peak": Regime(seconds=long, levels={"coders": most}),
                "batch": Regime(seconds=(400, 900), levels={"coders": some, "batch": (0.4, 0.8)}),
            },
            order=RANDOM,
            seconds=(7200, 14400),
        ),
    ]
    return {one.name: one for one in made}
