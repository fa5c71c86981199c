"""Errors name the line of the user's program, even if its folder or a module is named mpidist."""

import sys
from pathlib import Path

import pytest
from python_path import python_path

import mpidist
from mpidist.launch.launchers import launch

PROGRAM = """
import numpy as np
from mpi4py import MPI
import mpidist as md

comm = MPI.COMM_WORLD
try:
    md.allreduce(comm, np.ones(3 + comm.rank))  # line 8
except md.MismatchError as error:
    print("".join(f"<{mine}>" for mine in (md.__file__, error)), flush=True)
"""


@pytest.mark.parametrize(
    ("package", "program"),
    [
        ("mpidist", "mpidist-runs"),
        ("mpidist", "mpidist_runs/mpidist"),
        ("mpidist/mpidist", "mpidist"),
    ],
)
def test_a_program_whose_path_begins_like_ours(tmp_path, package, program):
    place, folder = tmp_path / package, tmp_path / program
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(Path(mpidist.__file__).parent)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(PROGRAM)
    path = python_path(place.parent)
    done = launch(2, [sys.executable, str(folder / "train.py")], env={"PYTHONPATH": path})
    assert done.stdout.count(str(place)) == 2, done.stdout + done.stderr
    assert done.stdout.count("train.py:8") >= 2, done.stdout
