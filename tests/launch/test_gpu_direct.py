"""The file that proves that MPI can use device memory is written only if every value was right."""

import json
import sys
from pathlib import Path

import pytest

from mpidist.launch import processes
from mpidist.launch.launchers import launch, launch_environment

# A fake device whose memory is host memory: to MPI it is a device array that works. The other one
# hands out the address of a copy, as an MPI does that has not seen what the device wrote.
PROGRAM = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import fake_cupy, numpy as np
from mpidist import arrays
mode = sys.argv[2]
if mode == "stale":
    copies = []
    def stale(self):
        copies.append(np.full_like(self.memory, 7))
        return {**copies[-1].__array_interface__, "version": 3}
    fake_cupy.ndarray.__cuda_array_interface__ = property(stale)
with fake_cupy.installed() as cupy:
    if mode == "ask":
        arrays.set_direct(True)
        print("direct", arrays.mpi_direct(cupy.empty(3)))
    else:
        sys.argv = ["gpu_probe"]
        runpy.run_module("mpidist.gpu_direct", run_name="__main__")
"""
FAKES = str(Path(__file__).parents[1] / "unit")


@pytest.fixture
def run(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(mode, n=2):
        command = [sys.executable, str(program), FAKES, mode]
        if mode == "ask":  # without MPI
            home = {"HOME": str(tmp_path)}
            return processes.run(command, env=launch_environment(home), timeout=60)
        return launch(n, command, env={"HOME": str(tmp_path)}, timeout=60)

    run.proofs = lambda: list((tmp_path / ".cache" / "mpidist").glob("*"))
    return run


def test_proof_is_written_believed_and_taken_back(run):
    """Staged by default; direct after a proof; staged again when a later probe fails."""
    assert "direct False" in run("ask").check().stdout
    assert "device memory works" in run("works").check().stdout
    (proof,) = run.proofs()
    assert json.loads(proof.read_text()) == {"direct": True, "wrong": []}
    assert "direct True" in run("ask").check().stdout

    failed = run("stale")
    assert failed.returncode == 1
    assert "wrong values after Allreduce of 1," in failed.stdout
    assert json.loads(run.proofs()[0].read_text())["direct"] is False
    assert "direct False" in run("ask").check().stdout


def test_without_a_device_there_is_one_line(run):
    result = launch(2, [sys.executable, "-m", "mpidist.gpu_direct"])
    if result.returncode == 0:
        assert "device memory works" in result.stdout  # a machine with a GPU and such an MPI
    else:
        assert result.returncode in (1, 2)
        assert result.stderr.count("mpidist: error: no GPU to work on") == (result.returncode == 2)
    assert run("works", 1).returncode == 2
