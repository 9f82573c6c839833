"""Where fine-tuning stood: weights and optimiser, read back without pickle."""

import io
import pickle
from pathlib import Path

import torch

from kvpilot.agent.training.errors import TrainingError
from kvpilot.agent.training.networks import Model
from kvpilot.engine.files import write_whole


def save_checkpoint(model: Model, path: Path) -> None:
    """Whole or not at all. Raises TrainingError."""
    stored = {
        "parameters": model.get_parameters(),
        "num_timesteps": model.num_timesteps,
        "num_updates": model._n_updates,
        "random_state": torch.get_rng_state(),
    }
    content = io.BytesIO()
    torch.save(stored, content)  # not to the file: torch does not say why that could not be written
    try:
        write_whole(path, content.getvalue())
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written: {error.strerror}; then go on with --resume"
        ) from error


def load_checkpoint(model: Model, path: Path) -> None:
    """Into `model`, which has the same networks. Raises TrainingError for any other file."""
    remedy = (
        "delete it to train this seed from its beginning, or resume with the config that it was made with"
    )
    try:
        stored = torch.load(path, weights_only=True)
        model.set_parameters(stored["parameters"], exact_match=True)
        model.num_timesteps, model._n_updates = stored["num_timesteps"], stored["num_updates"]
        torch.set_rng_state(stored["random_state"])
    except (OSError, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(f"{path} is no checkpoint of this training: {error}; {remedy}") from error
