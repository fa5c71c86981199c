"""A short run of `make soak`: a process does not hold more and more (R41); saves may be killed.

The runs have their own processes. They count communicators and requests by the numbers that MPI
gives them, and MPI uses a number again in an order that depends on all earlier calls.
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
looks = {"allreduces": lambda: soak.allreduces(comm, 1000),
         "checkpoints": lambda: soak.checkpoints(comm, 40, folder)}[sys.argv[2]]()
found = grown(comm, looks)
# Memory and objects: a short run has not come to rest, only much is too much.
limits = {name: limit for name, (_, _, limit) in found.items()}
limits.update(memory=4 << 20, objects=2000)
assert {name: grew for name, (_, grew, _) in found.items() if grew >= limits[name]} == {}
print("flat")
"""


def soaked(what):
    def play(folder):
        program = folder / "program.py"
        program.write_text(PROGRAM)
        return launch(2, [sys.executable, program, SOAK, what, folder], timeout=240)

    return play


def soak(*words):
    return lambda _: run([sys.executable, SOAK / words[0], *words[1:]], timeout=240)


#: At most this often, or for so many seconds: a launch and a kill take one.
KILLS = ["4", "10"]


@pytest.fixture(scope="module")
def scenes():
    return {
        "killed": soak("killed_saves.py", *KILLS, "0"),
        "killed, tiered": soak("killed_saves.py", *KILLS, "1"),
        "histories": soak("histories.py", "4"),
        "allreduces": soaked("allreduces"),
        "checkpoints": soaked("checkpoints"),
    }


@pytest.mark.parametrize("scene", ["allreduces", "checkpoints"], indirect=True)
def test_a_short_soak(scene):
    """Every algorithm, bound plans, arenas, in the background, on communicators; stores."""
    assert "flat" in scene[0].check().stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("scene", ["killed", "killed, tiered"], indirect=True)
def test_all_is_killed_around_saves(scene):
    """Issue 4: kill -9 of everything at random moments; `make soak` does it 200 times."""
    assert " times all was killed" in scene[0].check().stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("scene", ["histories"], indirect=True)
def test_random_histories(scene):
    """Issue 10, line 1: `make soak-histories` does 200 sequences."""
    assert "4 of 4 sequences" in scene[0].check().stdout
