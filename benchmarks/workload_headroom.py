"""What there is to win on the standard workloads: a grid of static settings, per family and per regime.

    benchmarks/workload_headroom.py TRACES [--families agentic_drift,switch] [--seeds 3] [--split train] [--json FILE]

Every setting plays the same episodes. `headroom` is the mean reward that the best setting of each regime would
collect, if it could be had the moment a regime begins, less that of the best setting over all: an estimate, since a
regime's windows depend on what was set before. Also printed: windows per CPU second, references not counted.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from kvpilot.agent.policies.static import StaticPolicy
from kvpilot.env.tuning.rollout import EpisodeResult, run_episode
from kvpilot.env.tuning.standard import NAMED, RANDOM_COMPOSITION, standard_workloads
from kvpilot.env.tuning.workload import Workload

SETTINGS: dict[str, dict[str, float]] = {
    name: dict(zip(("ttl_seconds", "size_factor", "max_batch", "kv_level"), values, strict=True))
    for name, values in {
        "default": (0.0, 0.0, 64, 0),
        "16 bit, retain .7": (60.0, 0.7, 64, 0),
        "8 bit, retain .3": (60.0, 0.3, 64, 1),
        "8 bit, retain .6": (60.0, 0.6, 64, 1),
        "8 bit, retain .9": (120.0, 0.9, 64, 1),
        "4 bit": (0.0, 0.0, 64, 2),
        "4 bit, retain .6": (60.0, 0.6, 64, 2),
        "4 bit, retain .9": (300.0, 0.9, 64, 2),
    }.items()
}


def by_regime(results: list[EpisodeResult]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for phase, parts in zip(result.windows["phase"], result.windows["reward"], strict=True):
            rewards[phase].append(parts["total"])
    return rewards


def study(workload: Workload, seeds: range) -> dict:
    """Prints the table of one family and returns its figures."""
    episodes = [workload.draw(seed) for seed in seeds]
    for episode in episodes:
        episode.reference()
    figures: dict[str, dict] = {}
    cpu_seconds = num_windows = 0.0
    regimes: dict[str, list[float]] = {}
    print(f"\n{workload.name}: {len(episodes)} episodes of the {workload.split} split")
    for name, knobs in SETTINGS.items():
        begin = time.process_time()
        results = [run_episode(episode, StaticPolicy(knobs, name)) for episode in episodes]
        cpu_seconds += time.process_time() - begin
        regimes = by_regime(results)
        num_windows += sum(map(len, regimes.values()))
        figures[name] = {
            "reward": fmean(reward for rewards in regimes.values() for reward in rewards),
            "latency_seconds": fmean(result.summary["e2e_seconds"]["mean"] for result in results),
            "hit_rate": fmean(result.summary["hit_rate"] for result in results),
            "regimes": {regime: fmean(rewards) for regime, rewards in sorted(regimes.items())},
        }
        row = figures[name]
        parts = "  ".join(f"{regime} {reward:+.3f}" for regime, reward in row["regimes"].items())
        print(
            f"  {name:26s} {row['reward']:+.3f}  {row['latency_seconds']:6.1f} s  hits {row['hit_rate']:.2f}   {parts}"
        )
    weights = {regime: len(rewards) / num_windows * len(SETTINGS) for regime, rewards in regimes.items()}
    best = max(figures, key=lambda name: figures[name]["reward"])
    tops = {regime: max(figures, key=lambda name: figures[name]["regimes"][regime]) for regime in weights}
    ideal = sum(weights[regime] * figures[top]["regimes"][regime] for regime, top in tops.items())
    headroom = ideal - figures[best]["reward"]
    speed = num_windows / cpu_seconds
    print(f"  best: {best}; by regime: {tops}; headroom {headroom:+.3f}; {speed:.0f} windows per CPU second")
    return {
        "settings": figures,
        "best": best,
        "by_regime": tops,
        "headroom": headroom,
        "windows_per_cpu_second": speed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--families", default=",".join((*NAMED, RANDOM_COMPOSITION)))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--split", default="train")
    parser.add_argument("--json", type=Path, help="write the figures")
    args = parser.parse_args()
    workloads = standard_workloads(args.traces, split=args.split)
    found = {name: study(workloads[name], range(args.seeds)) for name in args.families.split(",")}
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
