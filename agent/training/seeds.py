"""One network: cloned, fine-tuned, validated on the way; its best state is kept."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import configure

from kvpilot.agent.interrupt import without_interrupts
from kvpilot.agent.training.checkpoints import load_checkpoint, save_checkpoint
from kvpilot.agent.training.clone import CloneReport
from kvpilot.agent.training.demonstrations import Demonstrations
from kvpilot.agent.training.environments import make_environments
from kvpilot.agent.training.errors import TrainingError
from kvpilot.agent.training.export import export
from kvpilot.agent.training.fine_tuning import WORKER_LOST, Progress, Watch, fine_tune, lost
from kvpilot.agent.training.networks import Model
from kvpilot.agent.training.request import TrainRequest
from kvpilot.agent.training.rounds import cloned
from kvpilot.agent.training.screen import Screen
from kvpilot.agent.training.validation import Validator
from kvpilot.engine.files import write_whole

CHECKPOINT, POINTS, BEST, CURRENT = "checkpoint.pt", "points.json", "best", "current"
CLONE_SEED, PPO_SEED = 1000, 2000  # apart from those of the labelled episodes


@dataclass(frozen=True, kw_only=True)
class Point:
    """A state that was validated. `steps` are decisions of PPO; 0 is the clone."""

    steps: int
    reward: float  # on the validation episodes
    by_workload: dict[str, float]
    changes_per_hour: float
    training_reward: float | None = None  # per decision, of the last rollouts of PPO


class SeedRun:
    """Training of one seed in its own folder, from its beginning or from where it was left."""

    def __init__(
        self,
        request: TrainRequest,
        seed: int,
        data: Demonstrations,
        validator: Validator,
        screen: Screen,
        is_stopped: Callable[[], bool],
        on_point: Callable[[Point], None] = lambda point: None,
    ) -> None:
        self.request, self.seed, self.data = request, seed, data
        self.validator, self.screen = validator, screen
        self.is_stopped, self.on_point = is_stopped, on_point
        self.folder = seed_folder(request, seed)
        self.points = read_points(self.folder)

    @property
    def is_done(self) -> bool:
        return bool(self.points) and self.points[-1].steps >= self.request.config.ppo.steps

    def run(self) -> list[Point]:
        """Raises StoppedError, TrainingError; what was reached is in the folder."""
        if self.is_done:
            return self.points
        self.folder.mkdir(parents=True, exist_ok=True)
        model = self._start()
        if self.request.config.ppo.steps:
            self._fine_tune(model)
        return self.points

    def _start(self) -> Model:
        """The clone, or what the checkpoint holds."""
        config = self.request.config
        num_epochs = config.clone.members * config.clone.epochs
        with self.screen.stage(f"seed {self.seed}: cloning", num_epochs) as advance:
            model, report = cloned(
                self.request, self.data, CLONE_SEED + self.seed, lambda epoch: advance(epoch, "")
            )
            advance(num_epochs, _in_words(report))
        checkpoint = self.folder / CHECKPOINT
        if checkpoint.exists():
            load_checkpoint(model, checkpoint)
        if self._is_due(model):
            self._note(model, None)
        return model

    def _is_due(self, model: Model) -> bool:
        """Whether its state is to be validated: at the beginning, and where an earlier run was ended while it did."""
        if not self.points:
            return True
        steps, selection = self.request.config.ppo.steps, self.request.config.selection
        unseen = model.num_timesteps - self.points[-1].steps
        return unseen >= selection.every_steps or (unseen > 0 and model.num_timesteps >= steps)

    def _fine_tune(self, model: Model) -> None:
        config = self.request.config
        episodes = [self.request.training_episode(k) for k in range(self.request.num_training_episodes)]
        seed = [PPO_SEED, self.seed, model.num_timesteps]
        try:
            with without_interrupts():
                env = make_environments(config, self.request.actions, self.request.weights, episodes, seed)
        except WORKER_LOST as error:
            raise TrainingError(lost(None, self.folder / CHECKPOINT)) from error
        try:
            model.set_env(env)
            model.set_logger(
                configure(str(self.request.out / "tensorboard" / f"seed-{self.seed}"), ["tensorboard"])
            )
            label = f"seed {self.seed}: PPO"
            with self.screen.stage(label, config.ppo.steps) as advance:
                watch = Watch(
                    self.is_stopped, lambda progress: advance(progress.steps, self._words(progress))
                )
                fine_tune(
                    model,
                    steps=config.ppo.steps,
                    every_steps=config.selection.every_steps,
                    checkpoint=self.folder / CHECKPOINT,
                    watch=watch,
                    on_pause=lambda steps: self._note_and_log(model, watch.reward),
                )
        finally:
            close_quietly(env)

    def _note_and_log(self, model: Model, training_reward: float) -> None:
        self._note(model, training_reward)
        model.logger.record("validation/reward", self.points[-1].reward)
        model.logger.record("validation/changes_per_hour", self.points[-1].changes_per_hour)
        model.logger.dump(model.num_timesteps)

    def _note(self, model: Model, training_reward: float | None) -> None:
        """Validates, keeps the state if it is the best so far, and says so on disk."""
        export(model.policy, self.request, self.data, self.folder / CURRENT, {})
        score = self.validator.exported(self.folder / CURRENT)
        is_best = score.reward > max((point.reward for point in self.points), default=-math.inf)
        point = Point(steps=model.num_timesteps, training_reward=training_reward, **score._asdict())
        if is_best:
            evaluation = {"split": "validation", "seed": self.seed, **asdict(point)}
            export(model.policy, self.request, self.data, self.folder / BEST, evaluation)
        self.points.append(point)
        write_json(self.folder / POINTS, [asdict(one) for one in self.points])
        if not model.num_timesteps:
            save_checkpoint(model, self.folder / CHECKPOINT)
        self.on_point(point)

    def _words(self, progress: Progress) -> str:
        best = max(point.reward for point in self.points)
        now = "" if math.isnan(progress.reward) else f"reward {progress.reward:.3f}, "
        return f"{now}validated {self.points[-1].reward:.4f}, best {best:.4f}"


def seed_folder(request: TrainRequest, seed: int) -> Path:
    return request.out / f"seed-{seed}"


def close_quietly(env: Any) -> None:
    """Its processes may have died already."""
    try:
        env.close()
    except (BrokenPipeError, EOFError, ConnectionResetError):
        for process in getattr(env, "processes", []):
            process.kill()


def read_points(folder: Path) -> list[Point]:
    """Empty where the seed was not begun. Raises TrainingError."""
    path = folder / POINTS
    if not path.exists():
        return []
    try:
        return [Point(**values) for values in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise TrainingError(
            f"{path} is malformed ({error}); delete {folder} to train this seed again"
        ) from error


def write_json(path: Path, values: Any) -> None:
    """Whole or not at all."""
    write_whole(path, json.dumps(values, indent=1) + "\n")


def _in_words(report: CloneReport) -> str:
    if math.isnan(report.clone):
        return ""
    return (
        f"{report.clone:.3f} ahead (fixed {report.fixed:.3f}, rule {report.rule:.3f}, best {report.best:.3f})"
    )
