"""Optuna over what training itself depends on: environment, cloning and PPO, by reward on validation episodes."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna

from kvpilot.agent.jobs.workers import StoppedError
from kvpilot.agent.training.config import EnvironmentConfig, TrainConfig, to_toml
from kvpilot.agent.training.errors import TrainingError
from kvpilot.agent.training.request import TrainRequest
from kvpilot.agent.training.rounds import demonstrate
from kvpilot.agent.training.screen import Screen
from kvpilot.agent.training.seeds import Point, SeedRun
from kvpilot.agent.training.validation import Validator
from kvpilot.agent.tune.storage import open_storage, open_study
from kvpilot.env.tuning.reward import RewardWeights

STORAGE, BEST_CONFIG, TRIALS = "search.db", "best.toml", "trials"
CHURN_PRICES = (0.0, 0.002, 0.005)  # few: each needs demonstrations of its own
SHARED = "demonstrations"  # between trials, as far as they need the same


def search(
    request: TrainRequest, trials: int, screen: Screen, is_stopped: Callable[[], bool]
) -> tuple[Path, float]:
    """Until the study in `request.out` has so many trials; the best config as a file, and its reward.

    Raises StoppedError if it was stopped before a trial was done.
    """
    out = request.out
    inputs = {
        "workloads": request.hashes,
        "tuned": request.tuned.static_best.name,
        "base": to_toml(request.config),
    }
    study = open_study(open_storage(str(out / STORAGE)), "train", ["maximize"], inputs)
    study.sampler = optuna.samplers.TPESampler(seed=request.config.first_seed + len(study.trials))
    study.pruner = optuna.pruners.MedianPruner(n_startup_trials=4)
    done = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    if not study.trials:
        study.enqueue_trial(defaults(request.config))
    while len(study.get_trials(deepcopy=False, states=done)) < trials and not is_stopped():
        trial = study.ask()
        screen.say(f"trial {trial.number}")
        try:
            reward = _run_trial(trial, request, screen, is_stopped)
            study.tell(trial, reward)
            screen.say(f"trial {trial.number}: {reward:.4f}, best {study.best_value:.4f}")
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except (StoppedError, TrainingError, OSError, KeyboardInterrupt):
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params)  # its folder is begun anew
            if not is_stopped():
                raise
    return _best(study, request)


def _run_trial(
    trial: optuna.Trial, request: TrainRequest, screen: Screen, is_stopped: Callable[[], bool]
) -> float:
    """One seed: the best reward on validation episodes. Raises TrialPruned, StoppedError."""
    config = suggest(trial, request.config)
    folder = request.out / TRIALS / f"{trial.number:03}"
    shutil.rmtree(folder, ignore_errors=True)
    own = replace(request, config=config, out=folder, demonstrations=request.out / SHARED)
    rewards: list[float] = []

    def on_point(point: Point) -> None:
        rewards.append(point.reward)
        trial.report(max(rewards), point.steps)
        if trial.should_prune():
            raise optuna.TrialPruned

    data = demonstrate(own, screen, is_stopped)
    with Validator(own, is_stopped) as validator:
        SeedRun(own, config.first_seed, data, validator, screen, is_stopped, on_point).run()
    if is_stopped():
        raise StoppedError(f"stopped in trial {trial.number}")
    return max(rewards)


def suggest(trial: optuna.trial.BaseTrial, base: TrainConfig) -> TrainConfig:
    """`base` with the searched fields replaced; one seed."""
    recurrent = trial.suggest_categorical("recurrent", [False, True])
    churn = defaults(base)["churn_price"]
    averages = base.environment.averages or EnvironmentConfig().averages
    return base.with_(
        seeds=1,
        environment={
            "stack": 1 if recurrent else trial.suggest_int("stack", 1, 4),
            "averages": ()
            if recurrent or not trial.suggest_categorical("averages", [True, False])
            else averages,
            "decide_every": trial.suggest_int("decide_every", 1, 4),
            "churn_price": trial.suggest_categorical("churn_price", sorted({*CHURN_PRICES, churn})),
        },
        clone={
            "members": 1 if recurrent else base.clone.members,
            "hidden": (trial.suggest_int("units", 8, 128, log=True),) * 2,
            "input_noise": trial.suggest_float("input_noise", 0.0, 1.0),
            "temperature": trial.suggest_float("temperature", 0.003, 0.1, log=True),
            "weight_decay": trial.suggest_float("weight_decay", 1e-4, 1e-1, log=True),
            "hold_bias": trial.suggest_float("hold_bias", 0.0, 0.02),
            "rule_weight": trial.suggest_float("rule_weight", 0.0, 1.0),
        },
        ppo={
            "recurrent": recurrent,
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 3e-4, log=True),
            "clip": trial.suggest_float("clip", 0.05, 0.2),
            "target_kl": trial.suggest_float("target_kl", 0.003, 0.03, log=True),
            "discount": trial.suggest_float("discount", 0.85, 0.98),
            "gae_lambda": trial.suggest_float("gae_lambda", 0.8, 0.98),
            "entropy_weight": trial.suggest_float("entropy_weight", 0.0, 0.01),
        },
    )


def defaults(config: TrainConfig) -> dict[str, Any]:
    """The base itself, as the first trial."""
    environment, clone, ppo = config.environment, config.clone, config.ppo
    names = ("recurrent", "learning_rate", "clip", "target_kl", "discount", "gae_lambda", "entropy_weight")
    return {
        "stack": environment.stack,
        "averages": bool(environment.averages),
        "decide_every": environment.decide_every,
        "churn_price": RewardWeights().churn if environment.churn_price is None else environment.churn_price,
        "units": clone.hidden[0],
        **{
            name: getattr(clone, name)
            for name in ("input_noise", "temperature", "weight_decay", "hold_bias", "rule_weight")
        },
        **{name: getattr(ppo, name) for name in names},
    }


def _best(study: optuna.Study, request: TrainRequest) -> tuple[Path, float]:
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if not complete:
        raise StoppedError("stopped before a trial was done")
    best = study.best_trial
    config = suggest(optuna.trial.FixedTrial(best.params), request.config)
    path = request.out / BEST_CONFIG
    path.write_text(to_toml(config.with_(seeds=request.config.seeds)), encoding="utf-8")
    return path, study.best_value
