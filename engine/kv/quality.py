"""The measured quality loss of each codec, per model; made by `autotune bench quality`."""

import json
from collections.abc import Mapping
from importlib.resources import files


def quality_loss(model_name: str) -> Mapping[str, float]:
    """Mean KL (nats per token) by codec against an exact cache; empty for a model that was not measured."""
    table = json.loads(files("kvpilot.engine.kv").joinpath("quality.json").read_text())
    return table["models"].get(model_name, {}).get("kl_mean", {})
