"""The clairvoyant: tries every setting on the traffic to come, and takes the best. In the simulator only."""

from collections.abc import Mapping, Sequence

from kvpilot.agent.policies.changes import clip_knobs, only_changed
from kvpilot.agent.policies.static import StaticPolicy
from kvpilot.engine.config import KnobBounds
from kvpilot.engine.errors import ConfigError
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Proposal
from kvpilot.env.tuning.lookahead import lookahead
from kvpilot.env.tuning.run import EpisodeRun


class OraclePolicy:
    """Receding horizon: every `every_seconds` it looks `seconds` ahead for holding and for each of `settings`.

    A bound in practice, not in theory: what pays only beyond the horizon it does not see. It costs about
    `len(settings) * seconds / every_seconds` times the simulation of the episode itself.
    """

    name = "oracle"

    def __init__(
        self, settings: Sequence[Mapping[str, float]], seconds: float = 900.0, every_seconds: float = 300.0
    ) -> None:
        if not settings:
            raise ConfigError("settings is empty: the oracle needs at least one to choose from")
        if not 0 < every_seconds <= seconds:
            raise ConfigError(
                f"every_seconds={every_seconds!r} is invalid: expected a number in (0, {seconds:g}], the horizon"
            )
        self.settings = [StaticPolicy(setting).wanted for setting in settings]
        self.seconds = seconds
        self.every_seconds = every_seconds
        self.reset()

    def reset(self) -> None:
        self._run: EpisodeRun | None = None
        self._next_look = float("-inf")

    def attach(self, run: EpisodeRun) -> None:
        """The run that it controls and may look ahead in."""
        self._run = run

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        if self._run is None:
            raise ConfigError(
                "policy='oracle' is invalid here: it looks ahead in a simulation, and there is none"
            )
        if observation.time < self._next_look:
            return Proposal({}, "holds until it looks again")
        self._next_look = observation.time + self.every_seconds - 1e-6
        candidates = [{}, *(only_changed(clip_knobs(setting, bounds), knobs) for setting in self.settings)]
        different = [c for k, c in enumerate(candidates) if c not in candidates[:k]]
        values = lookahead(self._run, different, self.seconds, processes=1)
        best = max(range(len(values)), key=values.__getitem__)
        return Proposal(different[best], f"{values[best]:.3f} ahead, {values[0]:.3f} if it held")
