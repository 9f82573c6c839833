"""What the benchmarks that read traces answer to input that they cannot use."""

import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    """The module of a benchmark, by name."""

    def load(name: str):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("retention_study", ("/nonexistent",), "no such file"),
        ("retention_study", ("TRACE", "--minutes", "0"), "--minutes: 0: expected a number > 0"),
        ("retention_study", ("TRACE", "--users-pages", "foo"), "--users-pages: 'foo': expected USERS:PAGES"),
        ("retention_study", ("TRACE", "--users-pages", "0:5"), "--users-pages: '0:5'"),
        ("retention_study", ("TRACE",), "no think_seconds"),
        ("simulator_speed", ("/nonexistent",), "no such file"),
        ("simulator_speed", ("TRACE", "--runs", "0"), "--runs: '0': expected a number >= 1"),
        ("simulator_speed", ("TRACE", "--vidur-python", "/nonexistent"), "no such program"),
        ("simulator_speed", ("TRACE", "--json", "/nonexistent/a.json"), "expected a file in a folder"),
    ],
)
def test_bad_input_is_wrong_usage(benchmark, data, monkeypatch, capsys, name, args, says):
    given = [str(data / "mooncake.jsonl") if arg == "TRACE" else arg for arg in args]
    monkeypatch.setattr("sys.argv", [name, *given])
    with pytest.raises(SystemExit) as stopped:
        benchmark(name).main()
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert "Traceback" not in shown


def test_a_study_too_short_for_an_answer_has_a_row_all_the_same(benchmark, data):
    """Within a microsecond nothing is answered."""
    study = benchmark("retention_study")
    trace = study.read_trace(data / "session.json")
    hits, mean, done, forced = study.measure(trace, 1, 4000, 1e-6, study.VARIANTS[0])
    assert (done, forced) == (0, 0)
    assert mean != mean
    assert hits != hits
