"""``MPIDIST_VERBOSE``: errors, notes, or a line per operation; a bad value exits with 2 (R98)."""

import os
import subprocess
import sys

import pytest
from tiers import exhaustive

PROGRAM = """
import numpy as np
from mpi4py import MPI
import mpidist as md
from mpidist import events
from mpidist.launch import binding, start_checks, start_report

comm = MPI.COMM_WORLD
md.allreduce(comm, np.ones(10))
binding.check_binding(comm, {"OMP_NUM_THREADS": "9999"})
facts = start_checks.versions_fingerprint()
start_checks.check_launch(comm, {}, {**facts, "CPU": f"number {comm.rank}"})
with md.Topology(comm) as topology:
    line = start_report.startup_line(comm, topology, {})
if comm.rank == 0:
    print(line)
events.emit("step", number=7)
print("through", flush=True)
raise md.ConfigError("that is enough")
"""

ONE_LINE = (
    "mpidist: error: MPIDIST_VERBOSE='yes': expected 0 (errors only), 1 (notes) or 2 (every "
    "operation)"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("verbose") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.fixture(scope="module")
def ends(launches, program, chosen):
    def words(said):
        given = ["env", f"MPIDIST_VERBOSE={said}"] if said is not None else []
        return 2, [*given, sys.executable, program]

    levels = chosen("test_every_level_is_heard", "said")
    return launches({said: words(said) for said in (*levels, "yes")})


#: What is said -> how many notes, whether there is a line per operation, a traceback of what one
#: line can tell, and in the start-up line the variables that make the MPI library speak.
@pytest.mark.parametrize(
    ("said", "shown"),
    [("0", (0, 0, 0, 0)), exhaustive("1", (2, 0, 0, 0)), (None, (2, 0, 0, 0)),
     exhaustive("", (2, 0, 0, 0)), ("2", (2, 1, 1, 1))],
)  # fmt: skip
def test_every_level_is_heard(ends, said, shown):
    done = ends[said]
    assert done.returncode == 2, done.stderr
    notes = done.stderr.count("mpidist: note: ")
    heard = [word in done.stderr for word in ("step number=7", "Traceback")]
    hint = ", MPI's own messages: " in done.stdout
    assert (notes, *heard, hint) == shown, done.stderr
    assert "that is enough" in done.stderr


def test_another_word_is_one_line_and_code_2(ends):
    done = ends["yes"]
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(ONE_LINE) == 1
    assert "Traceback" not in done.stderr
    assert "through" not in done.stdout


@pytest.mark.parametrize("words", [["checkpoint", "list", "."], ["simulate", "draw", "-n", "2"]])
def test_a_command_without_mpi(words):
    done = subprocess.run(
        [sys.executable, "-m", "mpidist", *words],
        capture_output=True, text=True, timeout=60, env={**os.environ, "MPIDIST_VERBOSE": "yes"},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (2, "", ONE_LINE + "\n")


def test_one_process_alone(program):
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True, text=True, timeout=60, env={**os.environ, "MPIDIST_VERBOSE": "3"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("mpidist: error: MPIDIST_VERBOSE='3': expected 0 (errors only)")
    assert done.stderr.count("\n") == 1
