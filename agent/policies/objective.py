"""What a window is worth to a policy that only has live numbers."""

import math

from kvpilot.env.observation import Observation
from kvpilot.env.tuning.reward import RewardWeights, relative_loss, slo_share

WEIGHTS = RewardWeights()


def window_objective(observation: Observation) -> float | None:
    """The reward without what needs a reference; None where nothing was looked up, so that nothing can be said."""
    if observation.hit_rate is None:
        return None
    score = (
        WEIGHTS.hits * observation.hit_rate
        - WEIGHTS.slo * slo_share(observation)
        - WEIGHTS.quality * relative_loss(observation.quality_loss)
    )
    return score if math.isfinite(score) else None
