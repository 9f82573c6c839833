"""Rounds of labelling: first along the rule's states, then along those that the learner gets into."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvpilot.agent.jobs.workers import Workers
from kvpilot.agent.policies.exported import DESCRIPTION
from kvpilot.agent.training.clone import CloneReport, clone
from kvpilot.agent.training.config import MAX_MEMBERS
from kvpilot.agent.training.demonstrations import Demonstrations
from kvpilot.agent.training.errors import TrainingError
from kvpilot.agent.training.export import export
from kvpilot.agent.training.labelling import LabelTask, label
from kvpilot.agent.training.networks import Model, Normalization, build_model, join
from kvpilot.agent.training.offline import offline_vector
from kvpilot.agent.training.request import TrainRequest
from kvpilot.agent.training.screen import Screen
from kvpilot.engine.errors import KVPilotError

IsStopped = Callable[[], bool]


def demonstrate(request: TrainRequest, screen: Screen, is_stopped: IsStopped) -> Demonstrations:
    """All rounds; what an earlier run left is not made again. Raises StoppedError, TrainingError."""
    data: Demonstrations | None = None
    for number in range(request.config.demonstrations.rounds):
        learner = None
        if data is not None:
            learner = request.demonstrations_folder / f"learner-{number}"
            if not (learner / DESCRIPTION).exists():
                model, _ = cloned(request, data, request.config.first_seed)
                export(model.policy, request, data, learner, {})
        made = _label_round(request, number, learner, screen, is_stopped)
        data = made if data is None else Demonstrations.join([data, made])
    assert data is not None
    return data


def cloned(
    request: TrainRequest,
    data: Demonstrations,
    seed: int,
    on_epoch: Callable[[int], None] = lambda epoch: None,
) -> tuple[Model, CloneReport]:
    """A model joined of members that were fitted to the demonstrations, each from other weights and with other
    episodes held out; it has no environment to learn in yet. The report is the mean of theirs."""
    config, sizes = request.config, request.actions.sizes
    new_model = model_builder(request, data)

    def fitted(number: int) -> tuple[Model, CloneReport]:
        own = seed * MAX_MEMBERS + number
        member = new_model(own, 1)
        done = number * config.clone.epochs
        return member, clone(member.policy, data, config, sizes, own, lambda epoch: on_epoch(done + epoch))

    members, reports = zip(*map(fitted, range(config.clone.members)), strict=True)
    if len(members) == 1:
        return members[0], reports[0]
    joined = new_model(seed, len(members))
    join(joined.policy, [member.policy for member in members])
    return joined, CloneReport(*(sum(column) / len(column) for column in zip(*reports, strict=True)))


def model_builder(request: TrainRequest, data: Demonstrations) -> Callable[[int, int], Model]:
    """Makes models of new weights, by seed and by how many members wide, for inputs like these demonstrations."""
    config = request.config
    normalization = Normalization.of(data.stacked(config.environment.stack, config.environment.averages))
    env = offline_vector(len(normalization.mean), request.actions.sizes, config.ppo.envs)
    return lambda seed, members: build_model(config, env, normalization, seed, members)


def _label_round(
    request: TrainRequest, number: int, learner: Path | None, screen: Screen, is_stopped: IsStopped
) -> Demonstrations:
    settings = request.config.demonstrations
    first = number * settings.episodes
    tasks = [_task(request, first + k, number, learner) for k in range(settings.episodes)]
    todo = [task for task in tasks if not task.path.exists()]
    finished = len(tasks) - len(todo)
    by = "the rule" if learner is None else "the learner"
    label_text = f"round {number + 1} of {settings.rounds}, driven by {by}"
    with screen.stage(label_text, len(tasks)) as advance, Workers(label, request.config.workers) as workers:
        counts: list[int] = []

        def on_done(index: int, result: int | KVPilotError) -> None:
            if isinstance(result, KVPilotError):
                raise TrainingError(
                    f"labelling failed: {result}; finished episodes are kept, go on with --resume"
                ) from result
            counts.append(result)
            advance(finished + len(counts), f"{sum(counts)} look-aheads")

        advance(finished, "")
        workers.run(todo, on_done=on_done, is_stopped=is_stopped)
    return Demonstrations.join([Demonstrations.load(task.path) for task in tasks])


def _task(request: TrainRequest, number: int, round_number: int, learner: Path | None) -> LabelTask:
    config = request.config
    settings = config.demonstrations
    make = partial(
        LabelTask,
        episode=request.training_episode(number),
        path=request.demonstrations_folder / f"episode-{number:04}.npz",
        round=round_number,
        seed=number,
    )
    return make(
        actions=request.actions,
        rule=request.tuned.hysteresis,
        learner=learner,
        decide_every=config.environment.decide_every,
        weights=request.weights,
        label_every=None if settings.teacher == "rule" else settings.label_every,
        horizon_seconds=settings.horizon_seconds,
        explore=settings.explore,
    )
