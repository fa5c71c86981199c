"""The report of a resumed run about changed settings, and the command that starts the run again."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist import optim
from mpidist.supervisor import commands
from mpidist.training import settings, start_records, strategies
from mpidist.training.exchanges import server_strategy
from mpidist.training.resume_report import differences, kept, save_failure

ROOT = Path(__file__).parents[2]


class Model:
    def __init__(self):
        self.parameters = {"w": np.zeros(3)}

    def loss_and_gradients(self, batch, gradients, ready=None):
        return 0.0


GIVEN = {
    "model": Model(), "data": (np.zeros((8, 2)),), "optimizer": optim.sgd(0.1), "global_batch": 4,
    "epochs": None, "steps": 10, "seed": 0, "shuffle": True, "strategy": None, "test_data": None,
    "checkpoint": "a", "checkpoint_every": None, "resume": "auto", "stop_after": None,
    "microbatches": None, "check_replicas": None, "time_limit": None, "patience": None,
    "max_bad": 0.001, "retry_bad": False, "quarantine": None, "loading": None, "callbacks": (),
    "on_resize": None, "watch_seconds": 600.0, "elastic": False,
}  # fmt: skip


def words(**changed):
    """What a saved step keeps of these arguments of `md.train`."""
    given = {**GIVEN, **changed}
    return kept(settings.settings_in_words(settings.checked(2, **given), given))


COSINE = {"lr": optim.cosine(0.1, steps=100)}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {}, []),
        ({}, {"steps": 20, "global_batch": 8},
         ["global_batch: 4 when saved, 8 now", "steps: 10 when saved, 20 now"]),
        ({}, {"optimizer": optim.sgd(0.5)}, ["optimizer.lr: 0.1 when saved, 0.5 now"]),
        ({}, {"optimizer": optim.sgd(**COSINE)},
         ["optimizer.lr: 0.1 when saved, "
          "{schedule 'cosine', lr 0.1, steps 100, warmup 0, final 0} now"]),
        ({"optimizer": optim.sgd(**COSINE)}, {"optimizer": optim.sgd(optim.cosine(0.1, steps=200))},
         ["optimizer.lr.steps: 100 when saved, 200 now"]),
        ({}, {"optimizer": optim.clipped(optim.sgd(0.1), 1.0)},
         ["optimizer.clip_norm: none when saved, 1 now"]),
        ({"optimizer": optim.clipped(optim.sgd(0.1), 1.0)}, {},
         ["optimizer.clip_norm: 1 when saved, none now"]),
        ({"optimizer": optim.sgd(lambda step: 0.1)}, {"optimizer": optim.sgd(lambda step: 0.2)},
         ["optimizer.lr, an update of 0 at steps 0, 1, 10, 100, 1000: -0.1 -0.1 -0.1 -0.1 -0.1 "
          "when saved, -0.2 -0.2 -0.2 -0.2 -0.2 now"]),
        ({}, {"strategy": server_strategy.ParameterServer()},
         ["strategy: AllReduce when saved, ParameterServer now"]),
        ({}, {"strategy": strategies.AllReduce(algorithm="ring")},
         ["strategy.algorithm: 'auto' when saved, 'ring' now"]),
        ({}, {"data": (np.zeros((9, 2)),)}, ["len(data): 8 when saved, 9 now"]),
        # Of one start, or seen to elsewhere.
        ({}, {"checkpoint": "b", "resume": True, "stop_after": 3, "time_limit": 5.0, "seed": 1,
              "shuffle": "none", "watch_seconds": 0, "retry_bad": True}, []),
    ],
)  # fmt: skip
def test_what_is_said_of_settings(before, now, said):
    """R109: all that may change what comes of a run, each in one line, in its own words."""
    assert differences(words(**before), words(**now)) == said


def test_a_step_of_an_older_version_is_not_told_of():
    assert differences({}, words()) == []
    assert differences({"steps": "10", "old": "1"}, {"steps": "10", "new": "2"}) == []


def test_the_parameters_are_not_kept_twice():
    assert not [name for name in words() if name.startswith(("model.", "order of"))]


# ------------------------------------------------------------------------------------ starts


def test_starts_are_numbered(tmp_path):
    """None is overwritten, whatever lies there."""
    job = tmp_path / "job.toml"
    for number in range(1, 4):
        job.write_text(f"steps = {number}\n")
        start_records.keep(tmp_path, job, {"command": str(number)})
        (tmp_path / "starts" / "notes.json").touch()
    (tmp_path / "starts" / "0007.json").touch()
    start_records.keep(tmp_path, job, {})
    assert sorted(path.name for path in (tmp_path / "starts").glob("0*.toml")) == [
        "0001.toml", "0002.toml", "0003.toml", "0008.toml"
    ]  # fmt: skip
    assert (tmp_path / "starts/0002.toml").read_text() == "steps = 2\n"
    assert '"command": "2"' in (tmp_path / "starts/0002.json").read_text()


# ----------------------------------------------------------------------------- the line for again


@pytest.mark.parametrize(
    ("started_by", "library", "crowded", "words"),
    [
        ("", "Open MPI 5.0.11", True, ""),
        ("Open MPI's mpirun", "Open MPI 5.0.11", False, "mpirun -n 4"),
        ("Open MPI's mpirun", "Open MPI 5.0.11", True,
         "mpirun --map-by :oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n 4"),
        ("Open MPI's mpirun", "Open MPI 4.1.4", True,
         "mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -n 4"),
        ("MPICH's mpiexec", "MPICH 5.0.2", True,
         "mpirun -genv MPIR_CVAR_ENABLE_HEAVY_YIELD 1 -genv MPIR_CVAR_POLLS_BEFORE_YIELD 30 -n 4"),
        ("MPICH's mpiexec", "Intel MPI 2021.9", True, "mpirun -n 4"),
        ("srun", "Open MPI 5.0.11", True, "srun --mpi=pmix -n 4"),
        ("srun", "MPICH 5.0.2", False, "srun --mpi=pmi2 -n 4"),
    ],
)  # fmt: skip
def test_the_words_before_the_program(started_by, library, crowded, words, monkeypatch):
    monkeypatch.setattr(commands, "callable_as", lambda program: program)
    assert commands.again(4, started_by, library, crowded) == words.split()


def test_programs_are_named_as_a_shell_finds_them(tmp_path, monkeypatch):
    own = tmp_path / "venv" / "bin"
    own.mkdir(parents=True)
    for name in ("python", "mpidist"):
        (own / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert commands.callable_as("mpidist") == str(own / "mpidist")
    assert commands.callable_as("mpirun") == "mpirun"
    monkeypatch.chdir(tmp_path)
    assert commands.callable_as("mpidist") == "venv/bin/mpidist"
    monkeypatch.setenv("PATH", str(own))
    assert commands.callable_as("mpidist") == "mpidist"


def test_pages_with_many_ranks_say_what_few_cores_need():
    """`mpirun -n 4` as printed is refused by Open MPI on two cores: the page says what to add."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "jobs").rglob("*.*")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        ranks = [int(n) for n in re.findall(r"mpirun -n (\d+) (?:mpidist train|python )", text)]
        if max(ranks, default=0) > 2:
            assert "--map-by :oversubscribe" in text, page


def test_a_failed_save_has_its_step_once():
    """Also if the step is not known, as for a save that the program has begun before the run."""
    store = SimpleNamespace(path="runs/a")
    full = OSError("disk full")
    assert save_failure(full, 5, store) == "save of step 5 to runs/a: disk full"
    assert save_failure(full, None, store) == "save to runs/a: disk full"
    told = "save of step 3 to runs/a: rank 1: disk full"
    assert save_failure(OSError(told), None, store) == told
