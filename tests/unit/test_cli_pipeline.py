"""``mpidist pipeline``: its plans, drawings, exit codes and errors (R61, R63, R82, R84)."""

import json
import re
from pathlib import Path

import pytest

import mpidist
from mpidist.cli.main import main
from mpidist.pipeline import SCHEDULES, Layer, chain, read_profile, write_profile


@pytest.fixture
def profile(tmp_path):
    file = tmp_path / "profile.txt"
    layers = [Layer(f"n{k}", "Linear", 1e-3, 2e-3, 1e6, 1e6, k // 2) for k in range(4)]
    write_profile(chain(layers), file)
    return str(file)


def test_a_plan_as_json(profile, tmp_path, capsys):
    words = ["pipeline", "partition", profile, "--workers", "2", "--no-replication", "--json"]
    assert main([*words, "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bottleneck_seconds"] == pytest.approx(0.006)
    assert set(plan) == {
        "bottleneck_seconds", "single_seconds", "speedup", "data_parallel_seconds", "workers",
        "exact", "stages",
    }  # fmt: skip
    assert set(plan["stages"][0]) == {
        "nodes", "replicas", "seconds", "compute_seconds", "parameter_bytes", "input_bytes",
        "output_bytes", "in_flight", "memory_bytes",
    }  # fmt: skip
    assert main([*words, str(tmp_path / "plan.json")]) == 0
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    out = capsys.readouterr().out
    assert "n0 .. n1" in out
    assert "2.00 times as fast as one worker" in out


JOB = """
global_batch = 64
steps = 1
microbatches = 16
[data]
name = "digits"
[model]
name = "mlp"
sizes = [[1, 8, 8], 32, 10]
[optimizer]
name = "sgd"
lr = 0.1
"""


def test_a_measured_profile_can_be_cut(tmp_path, monkeypatch, capsys):
    """`profile` writes what `partition` reads, for a microbatch of the job's model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["pipeline", "profile", "job.toml", "--repeats", "1"]) == 0
    assert "microbatch of 4 samples" in (told := capsys.readouterr().out)
    assert "mpidist pipeline partition job.profile.txt --workers N" in told
    layers = read_profile("job.profile.txt").layers
    assert [layer.text for layer in layers] == ["Rows", "Dense(dense1)", "Relu", "Dense(dense2)"]
    assert [layer.output_bytes for layer in layers] == [4 * 64 * 4, 4 * 32 * 4, 4 * 32 * 4, 160]
    assert [layer.parameter_bytes for layer in layers] == [0, 4 * 65 * 32, 0, 4 * 330]
    assert all(layer.forward > 0 for layer in layers)
    assert main(["pipeline", "partition", "job.profile.txt", "--workers", "2"]) == 0
    words = ["--set", "microbatches=3", "--out", "other.txt"]
    assert main(["pipeline", "profile", "job.toml", *words]) == 0
    assert read_profile("other.txt").layers[-1].output_bytes == 22 * 10 * 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.toml"], "cannot read the job nothing.toml: No such file"),
        (["job.toml", "--repeats", "0"], "--repeats is 0"),
        (["job.toml", "--out", "no/such/folder.txt"], "No such file"),
        (["job.toml", "--set", "microbatches=0"], "microbatches=0"),
        (["job.toml", "--set", "model.name=tagger"], "model Tagger has no layers"),
    ],
)
def test_wrong_profiles_are_exit_code_2(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["pipeline", "profile", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_options_reach_the_search(profile, capsys):
    words = ["pipeline", "partition", profile, "--workers", "4", "--json", "-"]
    for more, stages in [
        (["--stages", "3"], 3),
        (["--evaluate"], 2),
        (["--cost", "serial", "--bandwidth", "1e3"], 1),
    ]:
        assert main([*words, *more]) == 0
        assert len(json.loads(capsys.readouterr().out)["stages"]) == stages


def test_what_does_not_fit_is_exit_code_1(profile, capsys):
    assert main(["pipeline", "partition", profile, "--workers", "2", "--memory", "10"]) == 1
    assert "no partition fits: 4 layers, 2 workers, 10 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", "0"], "workers is 0"),
        (["--workers", "2", "--bandwidth", "-1"], "bandwidth=-1.0"),
        (["--workers", "2", "--cost", "serail"], "serial"),
        (["--workers", "2", "--json", "/no/such/folder/x"], "--json"),
    ],
)
def test_wrong_options_are_exit_code_2(profile, capsys, words, told):
    assert main(["pipeline", "partition", profile, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_show(capsys, tmp_path):
    assert main(["pipeline", "show", "pipedream", "--stages", "2", "--microbatches", "3"]) == 0
    out = capsys.readouterr().out
    assert "rank 0  F0 F1 " in out
    assert "12.000 ms, idle 25.0%" in out
    assert "kept by each rank, times chunks: 2 1" in out
    assert "versions of the weights on each rank: 2 1" in out
    assert main(["pipeline", "show", "1f1b", "--microbatches", "900"]) == 0
    assert "no drawing" in capsys.readouterr().err


PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")
#: A command or a program of the page, and the output that follows.
TEXT = r"((?:(?!```).)*)```\n"
SHOWN = re.compile(rf"```console\n\$ mpidist {TEXT}\n```\n{TEXT}", re.DOTALL)
RUN = re.compile(rf"```python\n{TEXT}\n```\n{TEXT}", re.DOTALL)


def test_the_page_shows_what_the_code_draws(capsys):
    """Every schedule for 4 stages, and the cut of VGG16."""
    shown = [pair for pair in SHOWN.findall(PAGE) if pair[0].startswith("pipeline show")]
    assert {words.split()[2] for words, _ in shown} == set(SCHEDULES)
    for words, told in shown:
        assert main(words.split()) == 0
        assert capsys.readouterr().out == told
    ((program, told),) = RUN.findall(PAGE)
    exec(program, {"md": mpidist})
    assert capsys.readouterr().out == told
    assert "ranks: 15, layers: 18, 59 MB" in told


def test_a_picture_of_no_time(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "p.png"
    words = ["pipeline", "show", "1f1b", "--forward", "0", "--backward", "0"]
    assert main([*words, "--picture", str(file)]) == 0
    assert file.exists()
    assert "0.000 ms, idle 0.0%" in capsys.readouterr().out


def test_a_time_that_is_shorter_by_far(capsys):
    words = ["pipeline", "show", "1f1b", "--forward", "1e-310", "--backward", "1e10"]
    assert main(words) == 0
    assert "no drawing: a text of inf columns" in capsys.readouterr().err


def test_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "p.png"
    words = ["pipeline", "show", "interleaved", "--chunks", "2", "--picture", str(file)]
    assert main(words) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main([*words[:-1], "x.gif"]) == 2
    assert "x.gif" in capsys.readouterr().err


def test_a_trace_of_a_schedule_and_of_a_run(tmp_path, monkeypatch, capsys):
    """The events of Chrome's format: microseconds, a thread for each rank."""
    monkeypatch.chdir(tmp_path)
    words = ["pipeline", "show", "zero_bubble", "--stages", "2", "--microbatches", "2"]
    assert main([*words, "--trace", "show.json"]) == 0
    events = json.loads(Path("show.json").read_text())["traceEvents"]
    spans = [one for one in events if one["ph"] == "X"]
    assert sorted(one["args"]["name"] for one in events if one["ph"] == "M") == ["rank 0", "rank 1"]
    assert len(spans) == 12
    first = next(one for one in spans if (one["name"], one["tid"]) == ("F1", 1))
    assert (first["ts"], first["dur"], first["cat"]) == (3000, 1000, "forward")
    assert first["args"] == {"chunk": 1, "microbatch": 1}
    logs = Path("run/events")
    logs.mkdir(parents=True)
    old, new = ({"event": "pipeline_step", "rank": 1, "spans": [["F", 1, 0, t, t + 0.5]]}
                for t in (1.0, 2.0))  # fmt: skip
    lines = [json.dumps(old), '{"event": "other"}', json.dumps(new), '{"event": "pipeline_step"']
    (logs / "rank-1.jsonl").write_text("\n".join(lines))
    assert main(["pipeline", "trace", "run", "--out", "run.json"]) == 0
    (span,) = json.loads(Path("run.json").read_text())["traceEvents"][1:]
    assert (span["name"], span["tid"], span["ts"], span["dur"]) == ("F0", 1, 0, 500_000)
    assert main(["pipeline", "trace", "nothing"]) == 2
    assert "nothing: no steps of a pipeline" in capsys.readouterr().err
    assert main(["pipeline", "trace", "run", "--out", "no/folder.json"]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["interleaved", "--chunks", "2", "--microbatches", "6"], "the next one is 8"),
        (["1f1b", "--forward", "-1"], "--forward -1.0"),
        (["1f1b", "--bandwidth", "0"], "--bandwidth 0.0"),
        (["gpype"], "gpipe"),
    ],
)
def test_wrong_schedules(capsys, words, told):
    assert main(["pipeline", "show", *words]) == 2
    assert told in capsys.readouterr().err
