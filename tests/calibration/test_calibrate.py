"""`autotune calibrate` as far as it goes without a model."""

import pytest

from kvpilot.agent.cli import in_options
from kvpilot.agent.simulate.calibrate import CalibrateConfig, run_calibration
from kvpilot.engine.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read: No such file"), (b"", "it holds no steps"), (b"\xff\xfe", "not binary")],
)
def test_steps_that_cannot_be_fitted_are_refused_before_the_model_is_loaded(tmp_path, content, says):
    steps = tmp_path / "steps.jsonl"
    if content is not None:
        steps.write_bytes(content)
    config = CalibrateConfig(
        out=tmp_path / "p.json", model=str(tmp_path / "no-model"), name="p", fit_only=steps
    )
    with pytest.raises(ConfigError, match=says) as caught:
        run_calibration(config)
    assert in_options(str(caught.value), ["--fit-only", "x"]).startswith("--fit-only: fit_only=")
