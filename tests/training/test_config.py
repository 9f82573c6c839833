"""The configuration: what is wrong is named, what is saved reads back."""

import pytest

from kvpilot.agent.training.config import TrainConfig, quick, read_config, to_toml
from kvpilot.engine.errors import ConfigError, KVPilotError


def test_a_saved_config_reads_back_and_explains_itself(tmp_path):
    config = quick().with_(seeds=3, environment={"churn_price": 0.01}, ppo={"recurrent": True})
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert read_config(path) == config
    lines = [line for line in path.read_text().splitlines() if " = " in line]
    assert len(lines) > 30
    assert all("  # " in line for line in lines)


def test_the_defaults_read_back_too(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(TrainConfig()))
    assert read_config(path) == TrainConfig()


def test_a_file_changes_only_what_it_names(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text("seeds = 2\n[ppo]\nclip = 1\n")
    config = read_config(path, quick())
    assert (config.seeds, config.ppo.clip, config.demonstrations) == (2, 1.0, quick().demonstrations)


BAD = {
    "seeds = 0": "seeds=0 is invalid",
    "seeds = 2.5": "seeds=2.5 is invalid: expected a finite int",
    "sedes = 1": "sedes=1 is invalid: expected one of",
    "ppo = 1": "ppo=1 is invalid: expected a table",
    "workloads = [1]": "expected a list of str",
    "[ppo]\nlearning_rate = nan": "learning_rate=nan",
    "[ppo]\nbatch_size = 100": "divides envs",
    "[ppo]\nrecurrent = 1": "expected a finite bool",
    "[environment]\nactions = 'magic'": "portfolio, absolute, delta",
    "[environment]\nactions = 'absolute'": "teacher='lookahead' is invalid: expected rule",
    "[clone]\nhidden = []": "hidden",
    "seeds =": "is not TOML",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=BAD)
def test_bad_values_are_refused_by_name(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(KVPilotError, match=r"none\.toml cannot be read"):
        read_config(tmp_path / "none.toml")
