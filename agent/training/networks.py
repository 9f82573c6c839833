"""The networks, as stable-baselines3 policies: fixed normalisation, tanh layers, an optional LSTM."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv

from kvpilot.agent.policies.numpy_network import CLIP
from kvpilot.agent.training.config import TrainConfig

MIN_STD = 1e-3  # of features that hardly move: what is constant in training must not explode later

Model = PPO | RecurrentPPO


class Normalization(NamedTuple):
    """Of the stacked inputs, [D] each; from the demonstrations, constant from then on."""

    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    @classmethod
    def of(cls, inputs: NDArray[np.float32]) -> "Normalization":
        """`inputs` [N, D]."""
        std = np.maximum(inputs.std(axis=0), MIN_STD)
        return cls(inputs.mean(axis=0).astype(np.float32), std.astype(np.float32))


class NormalizedFeatures(BaseFeaturesExtractor):
    """(x - mean) / std, clipped. Buffers, not parameters: neither cloning nor PPO moves them."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, observation_space: spaces.Space, mean: list[float], std: list[float]) -> None:
        super().__init__(observation_space, features_dim=len(mean))
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return ((observations - self.mean) / self.std).clamp(-CLIP, CLIP)


def build_model(
    config: TrainConfig,
    env: VecEnv,
    normalization: Normalization,
    seed: int,
    members: int = 1,
) -> Model:
    """PPO with new weights, of the width of `members` networks. It logs nothing until it is given a logger."""
    ppo = config.ppo
    hidden = [members * units for units in config.clone.hidden]
    policy: dict[str, Any] = {
        "features_extractor_class": NormalizedFeatures,
        "features_extractor_kwargs": {
            "mean": normalization.mean.tolist(),
            "std": normalization.std.tolist(),
        },
        "net_arch": {"pi": hidden, "vf": hidden},
    }
    if ppo.recurrent:
        policy |= {"lstm_hidden_size": ppo.lstm_units, "enable_critic_lstm": False}
    kind = RecurrentPPO if ppo.recurrent else PPO
    model = kind(
        "MlpLstmPolicy" if ppo.recurrent else "MlpPolicy",
        env,
        learning_rate=ppo.learning_rate,
        n_steps=ppo.rollout_steps,
        batch_size=ppo.batch_size,
        n_epochs=ppo.epochs,
        gamma=ppo.discount,
        gae_lambda=ppo.gae_lambda,
        clip_range=ppo.clip,
        target_kl=ppo.target_kl,
        ent_coef=ppo.entropy_weight,
        vf_coef=ppo.value_weight,
        max_grad_norm=ppo.max_grad_norm,
        policy_kwargs=policy,
        seed=seed,
        device="cpu",
    )
    # Without a logger of its own, `learn` makes one that leaves a folder in the system's temporary folder.
    model.set_logger(Logger(folder=None, output_formats=[]))
    return model


def join(policy: ActorCriticPolicy, members: Sequence[ActorCriticPolicy]) -> None:
    """Makes `policy`, which is as wide as all of them, give the mean of their logits and of their values."""
    with torch.no_grad():
        for layers_of in (_actor_layers, _critic_layers):
            *hidden, head = layers_of(policy)
            *member_hidden, member_heads = zip(*(layers_of(member) for member in members), strict=True)
            for number, (layer, parts) in enumerate(zip(hidden, member_hidden, strict=True)):
                weights = [part.weight for part in parts]
                layer.weight.copy_(torch.block_diag(*weights) if number else torch.cat(weights))
                layer.bias.copy_(torch.cat([part.bias for part in parts]))
            head.weight.copy_(torch.cat([part.weight for part in member_heads], dim=1) / len(members))
            head.bias.copy_(torch.stack([part.bias for part in member_heads]).mean(dim=0))


def _actor_layers(policy: ActorCriticPolicy) -> list[torch.nn.Linear]:
    return _linear_layers([*policy.mlp_extractor.policy_net, policy.action_net])


def _critic_layers(policy: ActorCriticPolicy) -> list[torch.nn.Linear]:
    return _linear_layers([*policy.mlp_extractor.value_net, policy.value_net])


def logits_and_values(policy: ActorCriticPolicy, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, D] -> logits [N, A], values [N]. For an LSTM these are N decisions of one episode, from its first."""
    features = policy.extract_features(inputs)
    assert isinstance(features, torch.Tensor)
    for_actor = for_critic = features
    if isinstance(policy, RecurrentActorCriticPolicy):
        assert policy.critic is not None
        for_actor, _ = policy.lstm_actor(features)
        for_critic = policy.critic(features)
    latent_actor = policy.mlp_extractor.forward_actor(for_actor)
    latent_critic = policy.mlp_extractor.forward_critic(for_critic)
    return policy.action_net(latent_actor), policy.value_net(latent_critic).flatten()


def actor_tensors(policy: ActorCriticPolicy) -> dict[str, NDArray[np.float32]]:
    """The part that acts, by the names that NumpyNetwork reads."""
    extractor = policy.features_extractor
    assert isinstance(extractor, NormalizedFeatures)
    tensors: dict[str, Any] = {"normalization.mean": extractor.mean, "normalization.std": extractor.std}
    if isinstance(policy, RecurrentActorCriticPolicy):
        lstm = policy.lstm_actor
        tensors["lstm.input.weight"] = lstm.weight_ih_l0
        tensors["lstm.state.weight"] = lstm.weight_hh_l0
        tensors["lstm.bias"] = torch.add(lstm.bias_ih_l0, lstm.bias_hh_l0)  # pyright: ignore[reportArgumentType]
    for number, layer in enumerate(_linear_layers(policy.mlp_extractor.policy_net)):
        tensors[f"layers.{number}.weight"] = layer.weight
        tensors[f"layers.{number}.bias"] = layer.bias
    assert isinstance(policy.action_net, torch.nn.Linear)
    tensors["action.weight"], tensors["action.bias"] = policy.action_net.weight, policy.action_net.bias
    return {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in tensors.items()}


def load_actor(policy: ActorCriticPolicy, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """The reverse of `actor_tensors`, for networks without an LSTM; the part that values states stays as it is."""
    *hidden, head = _actor_layers(policy)
    names = [*(f"layers.{number}" for number in range(len(hidden))), "action"]
    with torch.no_grad():
        for name, layer in zip(names, [*hidden, head], strict=True):
            layer.weight.copy_(torch.from_numpy(tensors[f"{name}.weight"]))
            layer.bias.copy_(torch.from_numpy(tensors[f"{name}.bias"]))


def _linear_layers(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Linear]:
    return [module for module in modules if isinstance(module, torch.nn.Linear)]
