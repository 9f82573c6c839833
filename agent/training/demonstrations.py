"""Decisions with what they were worth: what the first policy is fitted to."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from kvpilot.agent.training.errors import TrainingError
from kvpilot.engine.files import whole_file
from kvpilot.env.tuning.vector import Stack

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """N decisions in order, episode after episode; F features, A choices in H groups (see Actions.sizes).

    `values` are mean rewards over the lookahead's horizon if the choice is held, NaN where none was made.
    """

    features: Floats  # [N, F]
    starts: NDArray[np.bool_]  # [N] the first of its episode
    values: Floats  # [N, A]
    rule: NDArray[np.int64]  # [N, H] the action nearest to what the tuned rule wants
    rewards: Floats  # [N] of the decision that was taken
    round: NDArray[np.int64]  # [N] of labelling; the last is along the states that the learner visits

    def __len__(self) -> int:
        return len(self.features)

    @property
    def num_labelled(self) -> int:
        return int(np.isfinite(self.values).all(axis=1).sum())

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        with whole_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **vars(self))

    @classmethod
    def load(cls, path: Path) -> "Demonstrations":
        """Raises TrainingError."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                return cls(**{f.name: stored[f.name] for f in fields(cls)})
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            remedy = "delete it: training labels that episode again"
            raise TrainingError(f"{path} holds no demonstrations ({error}); {remedy}") from error

    @classmethod
    def join(cls, parts: Sequence["Demonstrations"]) -> "Demonstrations":
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})

    def episodes(self) -> list[slice]:
        """The rows of each."""
        firsts = np.flatnonzero(self.starts).tolist()
        return [slice(first, stop) for first, stop in zip(firsts, [*firsts[1:], len(self)], strict=True)]

    def stacked(self, depth: int, averages: Sequence[float] = ()) -> Floats:
        """[N, copies * F] as the policy sees it; see Stack."""
        stack, inputs = Stack(depth, averages), []
        for features, starts in zip(self.features, self.starts, strict=True):
            if starts:
                stack.reset()
            inputs.append(stack.push(features))
        return np.stack(inputs)

    def returns(self, discount: float, min_rest: int) -> Floats:
        """[N] discounted rewards to the end of the episode; NaN for its last `min_rest`, which the end cuts short."""
        result = np.empty(len(self), np.float32)
        for rows in self.episodes():
            rest = 0.0
            for row in range(rows.stop - 1, rows.start - 1, -1):
                rest = float(self.rewards[row]) + discount * rest
                result[row] = rest
            result[max(rows.start, rows.stop - min_rest) : rows.stop] = np.nan
        return result
