"""From measured steps to a latency profile: non-negative, on relative errors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from kvpilot.engine.errors import KVPilotError
from kvpilot.env.calibration.measured import MeasuredStep
from kvpilot.env.simulator.latency import LatencyProfile, ProfiledModel, Ramp

Floats = NDArray[np.float64]

ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128)
SAMPLED_KNOTS = (0, 1, 4, 16)
HELD_OUT = 5  # one step in so many is not fitted but predicted
ROUNDS, SMALL_ERROR = 15, 0.01  # of the reweighting; errors below weigh alike
OUTLIER_RATIO = 1.5  # a step that took so many times its prediction was disturbed by something else


@dataclass(frozen=True, kw_only=True)
class FitError:
    """Relative errors of held-out steps, |predicted / measured - 1|."""

    count: int
    median: float
    p90: float
    bias: float  # median of predicted / measured - 1

    def as_dict(self) -> dict[str, float]:
        return {name: round(float(getattr(self, name)), 5) for name in ("count", "median", "p90", "bias")}


@dataclass(frozen=True, kw_only=True)
class Fit:
    profile: LatencyProfile
    errors: dict[str, FitError]  # by kind of step, and "all"
    num_outliers: int


def fit_profile(
    steps: Sequence[MeasuredStep],
    ladder: tuple[str, ...],
    *,
    name: str,
    model: ProfiledModel | None,
    engine: dict[str, int],
    quality_loss: dict[str, float],
    origin: dict[str, object],
) -> Fit:
    """Raises KVPilotError if the steps say too little: fewer than 8 fitted per kind."""
    kinds = np.array([step.kind for step in steps])
    held_out = _held_out(kinds)
    for kind in ("prefill", "decode", "mixed", "convert"):
        if np.count_nonzero((kinds == kind) & ~held_out) < 8:
            raise KVPilotError(
                f"too few steps of kind {kind!r} to fit: expected at least 8, run a larger grid"
            )
    columns = np.array([_columns(step) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    weights, outliers = _solve(columns[~held_out], seconds[~held_out])
    predicted = columns @ weights
    errors = {"all": _errors(predicted[held_out], seconds[held_out])}
    for kind in dict.fromkeys(kinds.tolist()):
        chosen = held_out & (kinds == kind)
        errors[kind] = _errors(predicted[chosen], seconds[chosen])
    origin = origin | {"held_out_error": {kind: error.as_dict() for kind, error in errors.items()}}
    profile = _profile(weights, ladder, name, model, engine, quality_loss, origin)
    return Fit(profile=profile, errors=errors, num_outliers=outliers)


def _held_out(kinds: NDArray[np.str_]) -> NDArray[np.bool_]:
    """One in HELD_OUT of each kind, drawn: the grid has a rhythm of its own."""
    chosen, rng = np.zeros(len(kinds), dtype=bool), np.random.default_rng(0)
    for kind in np.unique(kinds):
        rows = rng.permutation(np.flatnonzero(kinds == kind))
        chosen[rows[: len(rows) // HELD_OUT]] = True
    return chosen


def _columns(step: MeasuredStep) -> list[float]:
    """One column per coefficient; the order is that of `_profile`."""
    f = step.features
    return [
        float(step.is_step),
        f.prefill_tokens,
        f.prefill_attention,
        f.prefill_context,
        f.decode_sequences,
        f.moved_bytes,
        *_ramp_columns(ROW_KNOTS, f.prefill_tokens + f.decode_sequences),
        *_ramp_columns(SAMPLED_KNOTS, f.sampled_rows),
        *f.kv_bytes,
        *f.converted[1:],
    ]


def _ramp_columns(knots: tuple[int, ...], count: int) -> list[float]:
    stops = (*knots[1:], np.inf)
    return [float(min(max(count - start, 0), stop - start)) for start, stop in zip(knots, stops, strict=True)]


def _solve(columns: Floats, seconds: Floats) -> tuple[Floats, int]:
    """Weights that minimise the sum of absolute relative errors, by reweighted least squares.

    Absolute, not squared: a step that was disturbed by something else takes far too long, never too short.
    """
    relative = columns / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-30)  # columns differ by ten orders of magnitude
    weights, root = np.zeros(columns.shape[1]), np.ones(len(seconds))
    for _ in range(ROUNDS):
        weights = nnls(relative / scale * root[:, None], root, maxiter=10_000)[0] / scale
        root = np.maximum(np.abs(relative @ weights - 1), SMALL_ERROR) ** -0.5
    disturbed = seconds > OUTLIER_RATIO * columns @ weights
    return weights, int(np.count_nonzero(disturbed))


def _errors(predicted: Floats, measured: Floats) -> FitError:
    relative = predicted / measured - 1
    if not len(relative):
        return FitError(count=0, median=np.nan, p90=np.nan, bias=np.nan)
    median, p90 = np.quantile(np.abs(relative), [0.5, 0.9])
    return FitError(count=len(relative), median=median, p90=p90, bias=float(np.median(relative)))


def _profile(
    weights: Floats,
    ladder: tuple[str, ...],
    name: str,
    model: ProfiledModel | None,
    engine: dict[str, int],
    quality_loss: dict[str, float],
    origin: dict[str, object],
) -> LatencyProfile:
    values = iter(float(weight) for weight in weights)

    def ramp(knots: tuple[int, ...]) -> Ramp:
        return tuple((knot, next(values)) for knot in knots)

    return LatencyProfile(
        name=name,
        fixed=next(values),
        prefill_token=next(values),
        prefill_pair=next(values),
        prefill_context=next(values),
        sequence=next(values),
        moved_byte=next(values),
        rows=ramp(ROW_KNOTS),
        sampled=ramp(SAMPLED_KNOTS),
        kv_byte={codec: next(values) for codec in ladder},
        convert={codec: next(values) for codec in ladder[1:]},
        model=model,
        engine=engine,
        quality_loss=quality_loss,
        origin=origin,
    )
