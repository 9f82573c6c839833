"""The seeds' networks as one: differences between seeds are smaller than what validation can tell, their mean errs less
than most of them."""

from safetensors.numpy import load_file

from kvpilot.agent.policies.exported import WEIGHTS
from kvpilot.agent.training.demonstrations import Demonstrations
from kvpilot.agent.training.export import export
from kvpilot.agent.training.networks import join, load_actor
from kvpilot.agent.training.request import TrainRequest
from kvpilot.agent.training.rounds import model_builder
from kvpilot.agent.training.seeds import BEST, seed_folder
from kvpilot.agent.training.validation import Score, Validator

JOINED = "joined"


def join_seeds(request: TrainRequest, seeds: list[int], data: Demonstrations, validator: Validator) -> Score:
    """Writes OUT/joined: one wide network that gives the mean of the logits of the seeds' best states. Those have no
    LSTM. Raises StoppedError, TrainingError."""
    folder, width = request.out / JOINED, request.config.clone.members
    new_model = model_builder(request, data)
    members = []
    for seed in seeds:
        member = new_model(seed, width)
        load_actor(member.policy, load_file(seed_folder(request, seed) / BEST / WEIGHTS))
        members.append(member.policy)
    joined = new_model(seeds[0], width * len(seeds))
    join(joined.policy, members)
    export(joined.policy, request, data, folder, {})
    score = validator.exported(folder)
    export(joined.policy, request, data, folder, {"split": "validation", "seeds": seeds, **score._asdict()})
    return score
