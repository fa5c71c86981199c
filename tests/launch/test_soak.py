"""A short `make soak`: what a process holds stays the same (R41), and saves that are killed.

In processes of its own: MPI's numbers of communicators and requests, by which they are counted, are
used again in an order that depends on all that was there before.
"""

import sys
from pathlib import Path

import pytest

from mpidist.launch.launchers import launch
from mpidist.launch.processes import run

SOAK = Path(__file__).parents[1] / "soak"
PROGRAM = """
import sys
sys.path.append(sys.argv[1])
import soak
from mpi4py import MPI
from resources import grown
from mpidist.collectives import plan

plan.MAX_PLANS = 16
comm = MPI.COMM_WORLD
folder = sys.argv[3]
looks = {"allreduces": lambda: soak.allreduces(comm, 1500),
         "checkpoints": lambda: soak.checkpoints(comm, 40, folder)}[sys.argv[2]]()
found = grown(comm, looks)
# Memory and objects: a short run has not come to rest, only much is too much.
limits = {name: limit for name, (_, _, limit) in found.items()}
limits.update(memory=4 << 20, objects=2000)
assert {name: grew for name, (_, grew, _) in found.items() if grew >= limits[name]} == {}
print("flat")
"""


@pytest.mark.parametrize("what", ["allreduces", "checkpoints"])
def test_a_short_soak(tmp_path, what):
    """Every algorithm, bound plans, arenas, in the background, on communicators; stores."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), str(SOAK), what, str(tmp_path)]
    assert "flat" in launch(2, words, timeout=120).check().stdout


@pytest.mark.parametrize("tiered", [0, 1])
def test_all_is_killed_around_saves(tiered):
    """Issue 4: kill -9 of everything at random moments; `make soak` does it 200 times."""
    words = [sys.executable, SOAK / "killed_saves.py", "200", "20", str(tiered)]
    done = run(words, timeout=120).check()
    assert " times all was killed" in done.stdout


def test_random_histories():
    """Issue 10, line 1: `make soak-histories` does 200 sequences."""
    done = run([sys.executable, SOAK / "histories.py", "6"], timeout=120).check()
    assert "6 of 6 sequences" in done.stdout
