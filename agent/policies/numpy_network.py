"""The forward pass of an exported policy: normalisation, an optional LSTM, tanh layers, one logit per action."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

CLIP = 10.0  # standard deviations; beyond the training data a network extrapolates, so it sees the edge


class NumpyNetwork:
    """Equal to the torch network that it was exported from, to rounding. Keeps the LSTM's state between calls.

    Tensors: `normalization.mean`, `.std` [D]; `lstm.input.weight` [4U, D], `lstm.state.weight` [4U, U],
    `lstm.bias` [4U] (gates: input, forget, cell, output) or none of them; `layers.N.weight` [out, in],
    `layers.N.bias`; `action.weight` [A, in], `action.bias`.
    """

    def __init__(self, tensors: Mapping[str, Floats]) -> None:
        """Raises ValueError naming the tensor that is missing, of another shape or not finite."""
        self.mean = _take(tensors, "normalization.mean", (None,))
        width = self.num_inputs = len(self.mean)
        self.std = _take(tensors, "normalization.std", (width,))
        if not (self.std > 0).all():
            raise ValueError("tensor normalization.std holds a value that is not positive")
        self.lstm: tuple[Floats, Floats, Floats] | None = None
        if "lstm.bias" in tensors:
            units = len(_take(tensors, "lstm.bias", (None,))) // 4
            self.lstm = (
                _take(tensors, "lstm.input.weight", (4 * units, width)),
                _take(tensors, "lstm.state.weight", (4 * units, units)),
                _take(tensors, "lstm.bias", (4 * units,)),
            )
            width = units
        self.layers: list[tuple[Floats, Floats]] = []
        while f"layers.{len(self.layers)}.weight" in tensors:
            layer = _linear(tensors, f"layers.{len(self.layers)}", width)
            self.layers.append(layer)
            width = len(layer[1])
        self.action = _linear(tensors, "action", width)
        self.num_actions = len(self.action[1])
        self.reset()

    def reset(self) -> None:
        """Begin another sequence."""
        units = self.lstm[1].shape[1] if self.lstm else 0
        self._hidden = np.zeros(units, np.float32)
        self._cell = np.zeros(units, np.float32)

    def logits(self, inputs: Floats) -> Floats:
        """[D] -> [A]; the next in its sequence, where there is an LSTM."""
        x = np.clip((inputs - self.mean) / self.std, -CLIP, CLIP)
        if self.lstm is not None:
            x = self._step(x, *self.lstm)
        for weight, bias in self.layers:
            x = np.tanh(weight @ x + bias)
        weight, bias = self.action
        return weight @ x + bias

    def _step(self, x: Floats, from_input: Floats, from_state: Floats, bias: Floats) -> Floats:
        gates = from_input @ x + from_state @ self._hidden + bias
        i, f, g, o = np.split(gates, 4)
        self._cell = _sigmoid(f) * self._cell + _sigmoid(i) * np.tanh(g)
        self._hidden = _sigmoid(o) * np.tanh(self._cell)
        return self._hidden


def _sigmoid(x: Floats) -> Floats:
    return np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + np.float32(1.0))  # does not overflow


def _linear(tensors: Mapping[str, Floats], name: str, width: int) -> tuple[Floats, Floats]:
    weight = _take(tensors, f"{name}.weight", (None, width))
    return weight, _take(tensors, f"{name}.bias", (len(weight),))


def _take(tensors: Mapping[str, Floats], name: str, shape: tuple[int | None, ...]) -> Floats:
    if name not in tensors:
        raise ValueError(f"tensor {name} is missing")
    tensor = np.asarray(tensors[name], np.float32)
    fits = tensor.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"tensor {name} has shape {tensor.shape}: expected {shape}")
    if not np.isfinite(tensor).all():
        raise ValueError(f"tensor {name} holds values that are not finite")
    return tensor
