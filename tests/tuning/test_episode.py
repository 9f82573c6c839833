"""Episodes and workloads: written down, drawn again, replayed exactly."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from kvpilot.engine.errors import ConfigError
from kvpilot.env.traces.trace import TraceError
from kvpilot.env.tuning import reference
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.schedule import level_at
from kvpilot.env.tuning.standard import standard_workloads
from kvpilot.env.tuning.workload import Regime, StreamSpec, load_workload


def windows_of(episode, knobs=None):
    """Every number of every window, changing knobs on the way."""
    session, seen = episode.start(knobs), []
    while not session.is_done:
        session.set_knobs({"kv_level": len(seen) % 3, "size_factor": 0.1 * (len(seen) % 5)})
        window = session.advance(episode.interval_seconds)
        seen.append((window.end.time, dict(window.end.values), dict(window.end.histograms)))
    return seen


def test_an_episode_replays_exactly_from_its_json(episode):
    again = Episode.from_json(json.loads(json.dumps(episode.to_json())))
    assert again == episode
    assert again.hash == episode.hash
    assert windows_of(again) == windows_of(episode)
    assert len(windows_of(episode)) == episode.num_windows + 1  # and the last one of the warm-up


def test_the_seed_decides(episode):
    other = replace(episode, seed=8)
    assert other.hash != episode.hash
    assert windows_of(other) != windows_of(episode)


def test_the_hash_is_that_of_the_traffic_not_of_its_place(episode, folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    moved = Episode.from_json(episode.to_json(), folder=tmp_path)
    assert moved.hash == episode.hash
    text = (tmp_path / "sessions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "sessions.jsonl").write_text("".join(text[:-1]))
    assert moved.hash != episode.hash


def test_knobs_of_the_start_hold_in_the_warm_up(episode):
    default, lossy = episode.start(), episode.start({"kv_level": 2})
    assert lossy.knobs["kv_level"] == 2
    assert default.advance(10).end.total("pages_stepped_down") == 0
    assert lossy.advance(10).start.total("pages_stepped_down") > 0


def test_the_reference_is_simulated_once(episode, cache, monkeypatch):
    first = episode.reference()
    assert len(first.seconds) == episode.num_windows
    assert all(seconds is not None and seconds > 0 for seconds in first.seconds)
    assert first.at(episode.num_windows) is None
    monkeypatch.setattr(reference, "_simulate", lambda episode: pytest.fail("it was there already"))
    assert episode.reference() == first


def test_a_damaged_reference_is_made_anew(episode, cache):
    first = episode.reference()
    (kept,) = (cache / "reference").glob("*/*.json")
    kept.write_text(kept.read_text()[:20])
    assert episode.reference() == first


def test_windows_know_their_regime(episode):
    assert [episode.phase_at(k) for k in (0, 1, 2, 5, 6)] == ["quiet", "quiet", "busy", "busy", "late"]
    (closed,) = [stream for stream in episode.streams if stream.loop == "closed"]
    assert level_at(closed.level, episode.warmup_seconds + 2 * episode.interval_seconds) == 12.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": ()}, "streams is empty"),
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"seconds": 5.0}, "at least interval_seconds=10"),
        ({"warmup_seconds": 5.0}, "warmup_seconds=5.0"),
        ({"interval_seconds": float("nan")}, "interval_seconds=nan"),
    ],
)
def test_impossible_episodes_are_refused(episode, changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(episode, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kvpilot_episode": 99}, "kvpilot_episode=99 is invalid: expected 1"),
        ({"streams": [{"file": "a"}]}, "malformed.*loop"),
        ({"colour": "red"}, "malformed.*colour"),
    ],
)
def test_malformed_episodes_are_refused(episode, changes, message):
    with pytest.raises(ConfigError, match=message):
        Episode.from_json({**episode.to_json(), **changes})


# ---------------------------------------------------------------------- workloads
def test_a_draw_is_the_seed_s(workload):
    assert workload.draw(3) == workload.draw(3)
    assert len({workload.draw(seed).hash for seed in range(10)}) == 10


def test_draws_stay_within_what_is_allowed(workload):
    for seed in range(30):
        episode = workload.draw(seed)
        assert 80 <= episode.seconds <= 120
        assert episode.seconds % 10 == 0
        names = [name for _, name in episode.phases]
        assert all(a != b for a, b in pairwise(names)), "no regime follows itself"
        lengths = [b - a for (a, _), (b, _) in pairwise(episode.phases)]
        assert all(20 <= length <= 40 for length in lengths[1:])
        levels = {s.loop: s.level for s in episode.streams}
        for (_, name), (_, users) in zip(episode.phases, levels["closed"], strict=True):
            low, high = workload.regimes[name].levels["users"]
            assert low <= users <= high
        assert ("batch" in names) == ("one-off" in levels)


def test_regimes_in_turn(workload):
    fixed = workload.with_(order=("quiet", "busy"))
    assert {name for seed in range(9) for name in [fixed.draw(seed).phases[0][1]]} == {"quiet"}
    assert [name for _, name in fixed.draw(1).phases][:3] == ["quiet", "busy", "quiet"]
    rotated = fixed.with_(rotate=True)
    assert {rotated.draw(seed).phases[0][1] for seed in range(20)} == {"quiet", "busy"}


def test_splits_differ_in_sessions_only(workload):
    train, test = workload.draw(5), workload.with_(split="test").draw(5)
    assert replace(test, split="train") == train
    assert windows_of(train) != windows_of(test)


def test_a_workload_is_a_file(workload, tmp_path, folder):
    (tmp_path / "mine.json").write_text(json.dumps(workload.to_json()))
    assert load_workload(tmp_path / "mine.json", folder) == workload
    (tmp_path / "mine.toml").write_text(TOML)
    made = load_workload(tmp_path / "mine.toml")
    assert made.folder == str(tmp_path / "traces")
    assert made.regimes["night"] == Regime(seconds=(600, 1200), levels={"chat": (0.1, 0.2)})
    assert made.streams["chat"] == StreamSpec(file="chat.jsonl", loop="open")
    assert made.slo.ttft_seconds == 2.0


TOML = """
name = "mine"
folder = "traces"
seconds = [3600, 3600]
order = ["night", "day"]
slo = { ttft_seconds = 2.0 }
[streams.chat]
file = "chat.jsonl"
loop = "open"
[regimes.night]
seconds = [600, 1200]
levels = { chat = [0.1, 0.2] }
[regimes.day]
seconds = [600, 1200]
levels = { chat = [0.5, 0.8] }
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('order = ["night", "day"]', 'order = ["dusk"]', "order=.*dusk.* is invalid"),
        ('order = ["night", "day"]', 'order = "sorted"', "order='sorted' is invalid"),
        ('loop = "open"', 'loop = "ajar"', "loop='ajar' is invalid"),
        (
            "levels = { chat = [0.1, 0.2] }",
            "levels = { talk = [0.1, 0.2] }",
            "stream 'talk' of a regime is unknown",
        ),
        ("levels = { chat = [0.1, 0.2] }", "levels = { chat = [0.2, 0.1] }", "expected 0 < low <= high"),
        ('name = "mine"', "", "malformed.*name"),
        ('name = "mine"', "name = ", "cannot be read"),
        ('name = "mine"', 'name = "mine"\ncolour = 3', "malformed.*colour"),
        (
            'name = "mine"',
            'name = "mine"\npool_bytes = "large"',
            "pool_bytes='large' is invalid: expected int",
        ),
        (
            "seconds = [3600, 3600]",
            "seconds = [3600]",
            r"seconds=\[3600\] is invalid: expected a list of 2 float",
        ),
    ],
)
def test_wrong_files_are_refused(tmp_path, before, after, message):
    (tmp_path / "mine.toml").write_text(TOML.replace(before, after))
    with pytest.raises(ConfigError, match=message):
        load_workload(tmp_path / "mine.toml")


def test_a_rate_curve_modulates_a_level(tmp_path, workload, folder):
    """ServeGen rates: the mean over the episode is the level, the shape the curve's."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    rates = "".join(f"{600 * k},{rate},1.0,Gamma,1.0,1.0\n" for k, rate in enumerate([1.0, 3.0, 2.0, 2.0]))
    (tmp_path / "rates.csv").write_text(rates)
    spec = StreamSpec(file="sessions.jsonl", loop="open", curve_file="rates.csv", curve_seconds=(10.0, 10.0))
    steady = Regime(seconds=(500.0, 500.0), levels={"users": (0.4, 0.4)})
    waves = workload.with_(folder=str(tmp_path), streams={"users": spec}, regimes={"steady": steady})
    level = [value for _, value in waves.draw(2).streams[0].level]
    assert sum(level) / len(level) == pytest.approx(0.4)
    assert {round(value / min(level), 6) for value in level} == {1.0, 2.0, 3.0}


# ---------------------------------------------------------------------- the standard ones
def test_the_standard_workloads_need_their_files(tmp_path):
    with pytest.raises(TraceError, match="holds no mooncake/conversation"):
        standard_workloads(tmp_path)


def test_the_standard_workloads_draw(real_traces, monkeypatch):
    monkeypatch.delenv("KVPILOT_CACHE")
    made = standard_workloads(real_traces, split="validation")
    assert len(made) == 6
    for workload in made.values():
        episode = workload.draw(1)
        again = Episode.from_json(json.loads(json.dumps(episode.to_json())))
        assert again == episode
        session = replace(episode, warmup_seconds=120.0).start()
        assert session.advance(120.0).total("requests_finished") > 5
