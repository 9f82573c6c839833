"""An engine that notes what each of its steps did and how long it took."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO, runtime_checkable

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.engine import Engine
from kvpilot.engine.errors import InputError, KVPilotError
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.storage import CountingStorage, PageStorage
from kvpilot.engine.request import SampledToken, ScheduledRequest, StepOutput
from kvpilot.engine.runners.base import Runner
from kvpilot.engine.step_features import FeatureReader, StepFeatures


class MeasuredStep(NamedTuple):
    """`is_step` is false for a conversion or move measured apart from any step."""

    features: StepFeatures
    seconds: float
    kind: str  # prefill, decode, mixed or convert
    is_step: bool


@runtime_checkable
class _WorksLater(Protocol):
    """A storage whose device works later than it is asked to."""

    def settle(self) -> None: ...


class MeasuredEngine(Engine):
    """`last` is what the latest step did and took; None before the first, and after one that ran nothing.

    A step with prompt tokens takes until the device has computed them. One of prompts alone begins when the device
    is idle: what it had computed ahead of its schedule belongs to others.
    """

    def __init__(
        self, config: EngineConfig, shape: PageShape, runner: Runner, storage: PageStorage, **options: Any
    ) -> None:
        self._storage = storage if isinstance(storage, _WorksLater) else None
        counting = CountingStorage(storage, len(config.ladder))
        super().__init__(config, shape, runner, counting, **options)
        self.features = FeatureReader(self.pool, counting)
        self.last: MeasuredStep | None = None
        self._batch_features: StepFeatures | None = None
        self._idle_seconds = 0.0  # of this step, before the device was its own

    def settle(self) -> None:
        """Waits until the device has done what it was asked for."""
        if self._storage is not None:
            self._storage.settle()

    def step(self) -> list[StepOutput]:
        self._batch_features, self._idle_seconds = None, 0.0
        start = time.perf_counter()
        outputs = super().step()
        seconds = time.perf_counter() - start - self._idle_seconds
        features = self._batch_features
        self.last = None if features is None else MeasuredStep(features, seconds, kind_of(features), True)
        return outputs

    def _run(self, batch: list[ScheduledRequest], start: float) -> tuple[list[SampledToken | None], int]:
        self._batch_features = features = self.features.read(batch)
        if not features.prefill_tokens:
            return super()._run(batch, start)
        if not features.decode_sequences:
            begin = time.perf_counter()
            self.settle()
            self._idle_seconds = time.perf_counter() - begin
        results = super()._run(batch, start)
        self.settle()
        return results


def kind_of(features: StepFeatures) -> str:
    if features.prefill_tokens and features.decode_sequences:
        return "mixed"
    return "prefill" if features.prefill_tokens else "decode"


@dataclass
class StepLog:
    """Steps as JSON lines, flushed one by one: whatever stops the run, they are there."""

    path: Path

    def __post_init__(self) -> None:
        try:
            self._file: TextIO = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise KVPilotError(f"{self.path} cannot be written: {error.strerror}") from error
        self.steps: list[MeasuredStep] = []

    def add(self, step: MeasuredStep) -> None:
        self.steps.append(step)
        record = step._asdict() | {"features": step.features._asdict()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_steps(path: Path) -> list[MeasuredStep]:
    """What a StepLog wrote. Raises KVPilotError naming file and line."""
    steps = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            values: dict[str, Any] = record.pop("features")
            values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
            steps.append(MeasuredStep(features=StepFeatures(**values), **record))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path}: line {number}: not a measured step ({error})") from error
    return steps
