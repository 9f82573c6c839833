"""The first policy: fitted to what each action was worth in the same state, and to the tuned rule."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.policies import ActorCriticPolicy
from torch.nn import functional

from kvpilot.agent.training.config import CloneConfig, TrainConfig
from kvpilot.agent.training.demonstrations import Demonstrations
from kvpilot.agent.training.networks import NormalizedFeatures, logits_and_values

HELD_OUT = 10  # one episode in so many tells when to stop
PATIENCE = 40  # epochs without a better held-out loss
LIMIT = 10.0  # temperatures; what is worse than that is simply bad
BATCH = 256
HOLD = 0  # of every action set
RULE_WEIGHT = {"rule": 1.0, "lookahead": 0.0}


class CloneReport(NamedTuple):
    """Mean rewards over the lookahead's horizon on the held-out episodes: of the clone's choices, of always the
    one action that is best on the rest, of the rule's, and of the best choices. NaN without lookaheads."""

    clone: float
    fixed: float
    rule: float
    best: float
    epochs: float


class _Tensors(NamedTuple):
    inputs: torch.Tensor  # [N, D]
    targets: torch.Tensor  # [N, A] centred, in temperatures; NaN where not labelled
    rule: torch.Tensor  # [N, H]
    returns: torch.Tensor  # [N] NaN where unknown


def clone(
    policy: ActorCriticPolicy,
    data: Demonstrations,
    config: TrainConfig,
    sizes: Sequence[int],
    seed: int,
    on_epoch: Callable[[int], None] = lambda epoch: None,
) -> CloneReport:
    """Fits policy and value head in place. `sizes` are those of the action set."""
    rng = np.random.default_rng(seed)
    training, held_out = _split(data.episodes(), rng)
    loss_of = _Loss(policy, _tensors(data, config), config, sizes)
    loss_of.start_from_the_mean(_rows(training))
    best_loss, best_epoch, best = loss_of.held_out(held_out), 0, copy.deepcopy(policy.state_dict())
    optimizer = torch.optim.AdamW(
        policy.parameters(), config.clone.learning_rate, weight_decay=config.clone.weight_decay
    )
    for epoch in range(1, config.clone.epochs + 1):
        for rows in _batches(training, rng, config.ppo.recurrent):
            optimizer.zero_grad()
            loss_of.while_fitting(rows).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        loss = loss_of.held_out(held_out)
        if loss < best_loss:
            best_loss, best_epoch, best = loss, epoch, copy.deepcopy(policy.state_dict())
        on_epoch(epoch)
        if epoch - best_epoch >= PATIENCE:
            break
    policy.load_state_dict(best)
    choices = [_choices(policy, loss_of.tensors.inputs[_rows([part])]) for part in held_out]
    return report(data, training, held_out, np.concatenate(choices), best_epoch)


def advantages(values: NDArray[np.float32], config: CloneConfig) -> NDArray[np.float32]:
    """[N, A] values over their mean, in temperatures; a change pays `hold_bias`."""
    biased = values - config.hold_bias
    biased[:, HOLD] = values[:, HOLD]
    centred = biased - biased.mean(axis=1, keepdims=True)
    return np.clip(centred / config.temperature, -LIMIT, LIMIT).astype(np.float32)


def report(
    data: Demonstrations,
    training: list[slice],
    held_out: list[slice],
    chosen: NDArray[np.int64],
    epochs: int = 0,
) -> CloneReport:
    """`chosen` are the actions at the decisions of `held_out`, in order."""
    rows = _rows(held_out)
    known = np.isfinite(data.values[rows]).all(axis=1)
    values, chosen, rule = data.values[rows][known], chosen[known], data.rule[rows, 0][known]
    others = data.values[_rows(training)]
    others = others[np.isfinite(others).all(axis=1)]
    if not len(values) or not len(others):
        return CloneReport(math.nan, math.nan, math.nan, math.nan, epochs)
    every = np.arange(len(values))
    fixed = 1 + int(others[:, 1:].mean(axis=0).argmax())
    return CloneReport(
        clone=float(values[every, chosen].mean()),
        fixed=float(values[:, fixed].mean()),
        rule=float(values[every, rule].mean()),
        best=float(values.max(axis=1).mean()),
        epochs=epochs,
    )


class _Loss:
    """Of the action values where they are known, and of the rule's choice where it is wanted."""

    def __init__(
        self, policy: ActorCriticPolicy, tensors: _Tensors, config: TrainConfig, sizes: Sequence[int]
    ) -> None:
        self.policy, self.tensors, self.sizes = policy, tensors, list(sizes)
        self.rule_weight = RULE_WEIGHT.get(config.demonstrations.teacher, config.clone.rule_weight)
        self.value_weight = config.ppo.value_weight
        extractor = policy.features_extractor
        assert isinstance(extractor, NormalizedFeatures)
        self.noise = config.clone.input_noise * extractor.std

    def __call__(self, rows: NDArray[np.int64]) -> torch.Tensor:
        index = torch.from_numpy(rows)
        logits, _ = logits_and_values(self.policy, self.tensors.inputs[index])
        return self._of_choices(logits, index)

    def held_out(self, episodes: list[slice]) -> float:
        """Over episodes that are not fitted."""
        with torch.no_grad():
            return sum(float(self(_rows([part]))) for part in episodes)

    def while_fitting(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """With noise on the inputs, and with the loss of the value head, which has no say in when to stop."""
        index = torch.from_numpy(rows)
        inputs = self.tensors.inputs[index]
        noisy = inputs + self.noise * torch.randn_like(inputs)
        logits, values = logits_and_values(self.policy, noisy)
        loss = self._of_choices(logits, index)
        returns = self.tensors.returns[index]
        known = returns.isfinite()
        if not known.any():
            return loss
        return loss + self.value_weight * functional.smooth_l1_loss(values[known], returns[known])

    def _of_choices(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros((), requires_grad=True)
        targets = self.tensors.targets[index]
        known = targets.isfinite().all(dim=1)
        if known.any():
            centred = logits[known] - logits[known].mean(dim=1, keepdim=True)
            loss = loss + functional.smooth_l1_loss(centred, targets[known])
        if self.rule_weight:
            groups = zip(logits.split(self.sizes, dim=1), self.tensors.rule[index].T, strict=True)
            losses = [functional.cross_entropy(group, choice) for group, choice in groups]
            loss = loss + self.rule_weight * torch.stack(losses).mean()
        return loss

    def start_from_the_mean(self, rows: NDArray[np.int64]) -> None:
        """Before the first step the network prefers what is best on the whole: a static policy. With as few decisions
        as look-aheads can label, deviating from it is all that can be learned."""
        index = torch.from_numpy(rows)
        targets, returns = self.tensors.targets[index], self.tensors.returns[index]
        with torch.no_grad():
            for head, mean in (
                (self.policy.action_net, targets.nanmean(dim=0)),
                (self.policy.value_net, returns.nanmean()),
            ):
                assert isinstance(head, torch.nn.Linear)
                if mean.isfinite().all():
                    head.bias.copy_(mean)


def _choices(policy: ActorCriticPolicy, inputs: torch.Tensor) -> NDArray[np.int64]:
    with torch.no_grad():
        return logits_and_values(policy, inputs)[0].argmax(dim=1).numpy()


def _split(episodes: list[slice], rng: np.random.Generator) -> tuple[list[slice], list[slice]]:
    """Training and held-out episodes; a single episode is both."""
    order = rng.permutation(len(episodes))
    num_held_out = math.ceil(len(episodes) / HELD_OUT)
    held_out = [episodes[number] for number in order[:num_held_out]]
    return [episodes[number] for number in order[num_held_out:]] or held_out, held_out


def _tensors(data: Demonstrations, config: TrainConfig) -> _Tensors:
    discount = config.ppo.discount
    rest = round(1 / (1 - discount)) if discount < 1 else 0
    returns = data.returns(discount, rest)
    returns[data.round < data.round.max()] = np.nan  # earlier ones are of other policies
    values = data.values
    if config.demonstrations.teacher == "rule":
        values = np.full_like(values, np.nan)
    return _Tensors(
        inputs=torch.from_numpy(data.stacked(config.environment.stack, config.environment.averages)),
        targets=torch.from_numpy(advantages(values, config.clone)),
        rule=torch.from_numpy(data.rule),
        returns=torch.from_numpy(returns),
    )


def _batches(episodes: list[slice], rng: np.random.Generator, recurrent: bool) -> Iterator[NDArray[np.int64]]:
    """Rows: of one episode in order for an LSTM, which needs them so; else any."""
    if recurrent:
        for number in rng.permutation(len(episodes)):
            yield _rows([episodes[number]])
        return
    rows = rng.permutation(_rows(episodes))
    yield from np.array_split(rows, max(1, round(len(rows) / BATCH)))


def _rows(episodes: list[slice]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(part.start, part.stop) for part in episodes])
