"""A value of a wrong type, in a job file or on the command line, is an error of one line."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist import data, optim
from mpidist.cli import bench, train
from mpidist.cli.main import main
from mpidist.errors import ConfigError
from mpidist.supervisor.requests import Requests
from mpidist.training import job


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("digits", {"seed": -1}, "digits: seed is -1, expected a whole number of at least 0"),
        ("digits", {"test": 0.2}, "digits: test is 0.2, expected a whole number of at least 1"),
        ("digits", {"distort": 5}, "'digits' cannot be made with distort=5: TypeError: "),
        ("libsvm", {"path": 0, "test_path": "x"}, "'libsvm' cannot be made with path=0, "),
        ("libsvm", {"path": "F", "test_path": "F", "features": 2.5}, "features is 2.5"),
        ("hdf5", {"path": "F", "names": 5, "train": 1}, "names=5, train=1: TypeError: "),
        ("youtube8m", {"train": ".", "test": "."}, "tfrecord: cannot read .: Is a directory"),
    ],
)
def test_settings_of_data(name, settings, told, tmp_path):
    """No number is taken for a file descriptor, and no exception of Python gets through."""
    (tmp_path / "file").write_text("1 1:1\n")
    settings = {k: str(tmp_path / "file") if v == "F" else v for k, v in settings.items()}
    with pytest.raises(ConfigError) as caught:
        data.from_settings(name, settings)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_of_schedules():
    rate = {"schedule": "step_decay", "lr": 0.1, "every": 5, "factor": "half"}
    with pytest.raises(ConfigError, match="schedule 'step_decay' cannot be made with lr="):
        optim.from_settings("sgd", {"lr": rate})


def test_a_path_with_a_zero_byte(tmp_path):
    tables = 'data.name = "digits"\nmodel.name = "lenet"\noptimizer.name = "sgd"\n'
    (tmp_path / "job.toml").write_text('out = "a\\u0000b"\nsteps = 1\n' + tables)
    with pytest.raises(ConfigError, match=r"out='a\\x00b'; a path cannot contain a zero byte"):
        job.read_job(tmp_path / "job.toml")


@pytest.mark.parametrize("value", ["5", True, None])
def test_seconds_must_be_numbers(value):
    with pytest.raises(ConfigError, match=r"loading: starved_after is .*, expected a number"):
        data.Loading(starved_after=value)


@pytest.mark.parametrize(("rank", "size"), [(3, 3), (-1, 3), (3, 1), (0, 0)])
def test_no_such_rank_has_no_part(rank, size):
    """An empty part would hide that rank and size are in the wrong order."""
    with pytest.raises(ConfigError, match=f"rank {rank} of {size} ranks"):
        data.Sampler(10, 4).local(np.arange(4), rank, size)


@pytest.mark.parametrize("text", [f"x = {'9' * 5000}", "x = " + "[" * 5000 + "]" * 5000])
def test_toml_that_python_refuses(text, tmp_path):
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"job.toml is not TOML"):
        job.read_job(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text("")
    with pytest.raises(ConfigError, match=r"--set 'x=.*\.\.\.: "):
        job.read_job(tmp_path / "job.toml", [text.replace(" ", "")])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("folder", "cannot read the job .*folder: Is a directory; give"),
        ("latin-1.toml", "latin-1.toml is not UTF-8: 'utf-8' codec can't decode byte 0xe9"),
    ],
)
def test_job_files_that_cannot_be_read(name, told, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin-1.toml").write_bytes(b'out = "\xe9t\xe9"')
    with pytest.raises(ConfigError, match=told):
        job.read_job(tmp_path / name)


def test_the_file_for_the_rows_of_one_process_is_checked_once(tmp_path, monkeypatch):
    checked, rows = [], str(tmp_path / "rows")
    monkeypatch.setattr(bench, "start_ranks", lambda _: SimpleNamespace(rank=0, size=1))
    monkeypatch.setattr(bench.binding, "check_binding", lambda *_: None)
    monkeypatch.setattr(bench.step, "run", lambda *_: [])
    monkeypatch.setattr(bench, "_check_file", checked.append)
    assert main(["bench", "step", "--json", rows]) == 0
    assert checked == [rows]


@pytest.mark.parametrize("buffering", [1, -1])
@pytest.mark.parametrize("words", ["--help", "checkpoint list .", "pipeline show 1f1b"])
def test_the_reader_of_the_output_has_gone(words, buffering, capsys, tmp_path, monkeypatch):
    """As in `mpidist ... | head`: the exit code of SIGPIPE, because not all was done."""
    (tmp_path / "step-000000000001").mkdir()
    (tmp_path / "step-000000000001/MANIFEST.json").touch()
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(words.split()) == 141
    assert capsys.readouterr().err == ""


def test_a_broken_pipe_of_the_program_is_no_lost_reader(tmp_path, monkeypatch):
    """As that of a data source: its traceback tells where it was."""

    def run(argv):
        raise BrokenPipeError

    monkeypatch.setattr("mpidist.cli.main._run", run)
    with (tmp_path / "out").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError):
            main(["train", "job.toml"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("launch -n 1 --heartbeat -1 -- true", "--heartbeat -1; expected seconds, above 0"),
        ("launch -n 1 --grace nan -- true", "--grace nan; expected seconds"),
        ("launch -n 1 --stall-timeout 0 -- true", "--stall-timeout 0; expected seconds"),
        ("launch -n 1 --launcher no_such -- true", "--launcher 'no_such': no such program"),
        ("launch -n 1 -- no_such_program", "no program 'no_such_program' that can be run"),
        ("launch -n 1 -- ./file", "no program './file' that can be run"),
        ("bench loader --json no/rows", "--json no/rows: expected a file in a folder"),
        ("bench step --json .", "--json .: expected a file in a folder"),
        ("bench allreduce --min 100 --max 8", "--min 100 is above --max 8"),
        ("train job.toml --set model.seed=x", "seed of the model is 'x', expected a whole"),
    ],
)
def test_values_of_options(words, told, capsys, tmp_path, monkeypatch):
    """Each is found before a process is started, MPI begins, or anything is measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    Path("file").touch()
    Path("job.toml").write_text(
        'steps = 1\ndata.name = "digits"\noptimizer = { name = "sgd", lr = 0.1 }\n'
        'model = { name = "logistic", inputs = [1, 8, 8], classes = 10 }\n'
    )
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"file", "job.toml"}


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "-n", "1", "--launcher", "mpirun '", "--", "true"],
        ["launch", "-n", "1", "--hosts-from", "it's", "--", "true"],
        ["launch", "-n", "1", "--notice", "test -e 'file", "--", "true"],
        ["bench", "allreduce", "--advise", "--launcher", "mpirun '"],
    ],
)
def test_commands_with_an_open_quotation(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "No closing quotation" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_reader_of_a_rank_has_gone(monkeypatch):
    """The other ranks would wait for it: the exception hook must see an error of one line."""

    def prints(_):
        raise BrokenPipeError

    monkeypatch.setattr("mpidist.cli.main._run", prints)
    monkeypatch.setattr("mpidist.cli.main._is_one_of_several", lambda: True)
    monkeypatch.setattr("mpidist.cli.main._has_lost_its_reader", lambda _: True)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with pytest.raises(ConfigError, match="the reader of the output has ended"):
        main([])


def test_a_summary_that_cannot_be_written(tmp_path, capsys):
    """Only the first rank writes it, so this is an exit code, and no error that ends all ranks."""
    (tmp_path / "summary.json").mkdir()
    summary = SimpleNamespace(resumed_at=0, steps=1, as_dict=dict)
    assert train._report(SimpleNamespace(folder=tmp_path), summary, "again") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mpidist: error: the state of the run is saved, but ")


def test_a_notice_may_be_any_file(tmp_path):
    notice = tmp_path / "it's time"
    requests = Requests(tmp_path, str(notice))
    assert requests.look() is None
    notice.touch()
    assert requests.look().text == f"notice by {notice}"
    requests.close()
