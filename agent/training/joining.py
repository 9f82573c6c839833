"""The seeds' networks as one: differences between seeds are smaller than what validation can tell, their mean errs less
than most of them."""

from safetensors.numpy import load_file

from kvpilot.agent.policies.exported import WEIGHTS
from kvpilot.agent.training.demonstrations import Demonstrations
from kvpilot.agent.training.export import export
from kvpilot.agent.training.networks import Normalization, build_model, join, load_actor
from kvpilot.agent.training.offline import offline_vector
from kvpilot.agent.training.request import TrainRequest
from kvpilot.agent.training.seeds import BEST, seed_folder
from kvpilot.agent.training.validation import Score, Validator

JOINED = "joined"


def join_seeds(request: TrainRequest, seeds: list[int], data: Demonstrations, validator: Validator) -> Score:
    """Writes OUT/joined: one wide network that gives the mean of the logits of the seeds' best states. Those have no
    LSTM. Raises StoppedError, TrainingError."""
    config, folder = request.config, request.out / JOINED
    normalization = Normalization.of(data.stacked(config.environment.stack, config.environment.averages))
    env = offline_vector(len(normalization.mean), request.actions.sizes, config.ppo.envs)
    members = []
    for seed in seeds:
        member = build_model(config, env, normalization, seed, config.clone.members)
        load_actor(member.policy, load_file(seed_folder(request, seed) / BEST / WEIGHTS))
        members.append(member.policy)
    joined = build_model(config, env, normalization, seeds[0], config.clone.members * len(seeds))
    join(joined.policy, members)
    export(joined.policy, request, data, folder, {})
    score = validator.exported(folder)
    export(joined.policy, request, data, folder, {"split": "validation", "seeds": seeds, **score._asdict()})
    return score
