"""`autotune train`: demonstrations, clones, PPO, selection, one exported policy."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpilot.agent.jobs.workers import StoppedError
from kvpilot.agent.policies.exported import load_exported
from kvpilot.agent.training.config import TrainConfig, read_config, to_toml
from kvpilot.agent.training.errors import FolderError
from kvpilot.agent.training.export import provenance
from kvpilot.agent.training.joining import JOINED, join_seeds
from kvpilot.agent.training.request import TrainRequest
from kvpilot.agent.training.rounds import demonstrate
from kvpilot.agent.training.screen import Screen
from kvpilot.agent.training.seeds import BEST, Point, SeedRun, seed_folder, write_json
from kvpilot.agent.training.validation import Score, Validator
from kvpilot.engine.files import write_whole

CONFIG, INPUTS, TUNED, REPORT, POLICY = "config.toml", "inputs.json", "tuned.json", "training.json", "policy"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of it. `seeds` are the validated points by seed, `joined` is the network made of their best ones.
    One of them is exported, see `exported`."""

    baselines: dict[str, Score]
    seeds: dict[int, list[Point]]
    joined: Score | None  # None: one seed, networks with an LSTM, or stopped before all seeds were trained
    is_complete: bool
    policy: Path

    @property
    def best(self) -> dict[int, Point]:
        """The best state of each seed."""
        return {seed: _best_of(points) for seed, points in self.seeds.items()}

    @property
    def exported(self) -> int | None:
        """The seed whose best state is exported; None: it is the joined one. That is preferred where it beats what
        needs no training: seeds differ by less than validation can tell, so the best of their scores is mostly luck."""
        if self.joined is not None and self.joined.reward > max(s.reward for s in self.baselines.values()):
            return None
        return max(self.best, key=lambda seed: self.best[seed].reward)

    @property
    def score(self) -> Point | Score:
        """Of what is exported."""
        if self.exported is not None:
            return self.best[self.exported]
        assert self.joined is not None
        return self.joined


def train(request: TrainRequest, screen: Screen, is_stopped: Callable[[], bool]) -> Trained:
    """Raises StoppedError if it was interrupted before anything could be exported, TrainingError."""
    data = demonstrate(request, screen, is_stopped)
    screen.say(f"{len(data)} decisions, {data.num_labelled} with look-aheads")
    with Validator(request, is_stopped) as validator:
        with screen.stage("validating static-best and the rule", 2 * validator.num_episodes) as advance:
            baselines = validator.baselines(lambda done: advance(done, ""))
        seeds: dict[int, list[Point]] = {}
        num_done = 0
        for seed in range(request.config.first_seed, request.config.first_seed + request.config.seeds):
            run = SeedRun(request, seed, data, validator, screen, is_stopped)
            with suppress(StoppedError):
                run.run()
            if run.points:
                seeds[seed] = run.points
            num_done += run.is_done
            if is_stopped():
                break
        is_complete = num_done == request.config.seeds
        joined = None
        if is_complete and len(seeds) > 1 and not request.config.ppo.recurrent:
            with suppress(StoppedError):
                joined = join_seeds(request, list(seeds), data, validator)
    if not seeds:
        raise StoppedError("stopped before a policy was validated")
    return _conclude(
        request,
        Trained(
            baselines=baselines,
            seeds=seeds,
            joined=joined,
            is_complete=is_complete and not is_stopped(),
            policy=request.out / POLICY,
        ),
    )


def _conclude(request: TrainRequest, done: Trained) -> Trained:
    seed = done.exported
    source = request.out / JOINED if seed is None else seed_folder(request, seed) / BEST
    shutil.copytree(source, done.policy, dirs_exist_ok=True)
    report: dict[str, Any] = {
        "kvpilot_training": 1,
        "is_complete": done.is_complete,
        "exported": source.relative_to(request.out).as_posix(),
        "policy_hash": load_exported(done.policy).hash,
        "baselines": {name: score._asdict() for name, score in done.baselines.items()},
        "joined": done.joined and done.joined._asdict(),
        "seeds": {seed: [asdict(point) for point in points] for seed, points in done.seeds.items()},
        "provenance": provenance(request),
    }
    write_json(request.out / REPORT, report)
    return done


def open_folder(request: TrainRequest, *, resume: bool) -> None:
    """Begins a folder for this request, or checks that it is the one to go on with. Raises FolderError."""
    out, config, inputs = request.out, request.out / CONFIG, request.out / INPUTS
    values = {
        "static_best": request.tuned.static_best.name,  # what is no result of tuning is refused here
        "tuned_sha256": request.tuned_sha256,
        "workloads": request.hashes,
    }
    if not config.exists():
        if resume:
            raise FolderError(f"{out} holds no training to resume: there is no {config}")
        out.mkdir(parents=True, exist_ok=True)
        with suppress(shutil.SameFileError):
            shutil.copyfile(request.tuned_path, out / TUNED)
        write_json(inputs, values)
        write_whole(config, to_toml(request.config))
        return
    if not resume:
        raise FolderError(f"{out} holds a training: go on with --resume, or name another folder with --out")
    if read_config(config) != request.config:
        raise FolderError(f"{config} differs from this config: leave --config out, or name another --out")
    begun = json.loads(inputs.read_text(encoding="utf-8"))
    changed = [name for name, value in values.items() if begun.get(name) != value]
    if changed:
        raise FolderError(
            f"{out} was begun with other {' and '.join(changed)}: name the same --tuned and traffic, or another --out"
        )


def resumed_config(out: Path) -> TrainConfig:
    """The config that a training in `out` was begun with."""
    return read_config(out / CONFIG)


def _best_of(points: list[Point]) -> Point:
    return max(points, key=lambda point: point.reward)
