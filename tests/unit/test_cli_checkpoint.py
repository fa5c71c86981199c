"""``mpidist checkpoint`` and ``mpidist.load`` without MPI: outputs and exit codes."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from checkpoint_solo import Solo, equal, state_of, two_ranks

from mpidist.checkpoint.store import CheckpointStore
from mpidist.cli.checkpoint import add_parser, run
from mpidist.cli.train import beginning
from mpidist.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    with CheckpointStore(Solo(), tmp_path / "store") as store:
        for step in (100, 1200):
            store.save(step, state_of(step))
    return tmp_path / "store"


@pytest.fixture
def call(capfd):
    """Run the command: (exit code, standard output, standard error)."""

    def call(*words):
        parser = argparse.ArgumentParser("mpidist")
        add_parser(parser.add_subparsers(dest="command"))
        code = run(parser.parse_args(["checkpoint", *map(str, words)]))
        return code, *capfd.readouterr()

    return call


def damage(folder, step):
    """Change one byte of an array, where sizes and manifest do not tell."""
    path = folder / f"step-{step:012d}"
    shard = path / "shard-00000.h5"
    data = bytearray(shard.read_bytes())
    data[data.index(state_of(step)["parameters"]["w"].tobytes())] ^= 1
    shard.write_bytes(data)


def test_list(folder, call):
    code, out, _ = call("list", folder)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step", "100", "1200"]
    (folder / "step-000000000100" / "shard-00000.h5").unlink()
    code, out, _ = call("list", folder)
    assert code == 1
    assert "damaged: shard-00000.h5 is missing" in out


def test_show(folder, call):
    code, out, _ = call("show", folder)
    assert code == 0
    for text in ("step 1200", "parameters/w", "(50, 7)", "<f4", "step = 1200", "inf", "1 ranks"):
        assert text in out
    assert "step 100 " in call("show", folder, "--step", 100)[1]


def test_verify(folder, call):
    code, out, _ = call("verify", folder)
    assert code == 0
    assert out.count("good, ") == 2
    damage(folder, 1200)
    code, out, _ = call("verify", folder)
    assert code == 1
    assert "step 1200: damaged: shard-00000.h5, bytes 0:" in out
    assert "step 100: good" in out
    assert call("verify", folder, "--step", 100)[0] == 0
    assert call("verify", folder, "--step", 1200)[0] == 1


@pytest.mark.parametrize("words", [("list",), ("show",), ("verify",), ("export", "x.npz")])
def test_nothing_there_is_exit_code_2(tmp_path, call, words):
    """One line, that says what is not there."""
    action, *rest = words
    out = [tmp_path / name for name in rest]
    for path in (tmp_path / "none", tmp_path):
        code, _, said = call(action, path, *out)
        assert code == 2
        assert len(said.splitlines()) == 1
        assert "no checkpoint" in said
    (tmp_path / "file").write_text("x")
    assert call(action, tmp_path / "file", *out)[0] == 2


def test_a_step_that_is_not_there(folder, call):
    code, _, said = call("show", folder, "--step", 7)
    assert code == 2
    assert "steps there: [100, 1200]" in said


def test_export_to_hdf5(folder, tmp_path, call):
    code, out, _ = call("export", folder, tmp_path / "one.h5")
    assert code == 0
    assert "step 1200" in out
    expected = state_of(1200)
    with h5py.File(tmp_path / "one.h5") as file:
        assert equal(file["parameters/w"][...], expected["parameters"]["w"])
        assert equal(file["mask"][...], expected["mask"])
        extras = json.loads(file["__extras__"][...].tobytes())
    assert extras["values"]["step"] == 1200
    assert call("export", folder, tmp_path / "one.h5")[0] == 2  # never over what is there


def test_export_to_npz(folder, tmp_path, call):
    assert call("export", folder, tmp_path / "one.npz", "--step", 100)[0] == 0
    with np.load(tmp_path / "one.npz", allow_pickle=False) as file:
        assert equal(file["parameters/w"], state_of(100)["parameters"]["w"])
        assert equal(file["nothing"], state_of(100)["nothing"])
        assert json.loads(str(file["__extras__"]))["values"]["step"] == 100


def test_export_of_difficult_names_and_types(tmp_path, call):
    """Keys that look like paths stay inside the file; bfloat16 keeps its bits."""
    state = {
        "../../up": np.arange(3),
        "a/b": {"..": np.arange(2.0), "": np.ones(1), "%2F": np.zeros(2)},
        "b\0c": np.arange(5),
        "half": np.arange(4).astype(ml_dtypes.bfloat16),
        "when": np.array(["2026-01-02"], "M8[s]"),
        "text": np.array(["höhe"]),
    }
    with CheckpointStore(Solo(), tmp_path / "store") as store:
        store.save(1, state)
        assert equal(store.restore()[1], state)
    for name in ("one.h5", "one.npz"):
        assert call("export", tmp_path / "store", tmp_path / name)[0] == 0
    bits = state["half"].view("u2")
    with h5py.File(tmp_path / "one.h5") as file:
        names = ["..%2F..%2Fup", "__extras__", "a%2Fb", "b%00c", "half", "text", "when"]
        assert sorted(file) == names
        assert equal(file["half"][...], bits)
        assert sorted(file["a%2Fb"]) == ["%", "%252F", "%2E%2E"]
    with np.load(tmp_path / "one.npz", allow_pickle=False) as file:
        assert equal(file["half"], bits)
        assert json.loads(str(file["__extras__"]))["dtypes"]["half"] == "bfloat16"


def test_export_that_cannot_be(folder, tmp_path, call):
    for out in (tmp_path / "x.txt", tmp_path / "no" / "x.h5"):
        code, _, said = call("export", folder, out)
        assert code == 2
        assert len(said.splitlines()) == 1
    damage(folder, 1200)
    code, _, said = call("export", folder, tmp_path / "x.h5", "--step", 1200)
    assert code == 1
    assert "fail their checksum" in said
    code, out, said = call("export", folder, tmp_path / "x.h5")
    assert code == 0
    assert "step 100 " in out
    assert "passed over" in said
    assert [path.name for path in tmp_path.glob("*x.h5*")] == ["x.h5"]


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "mpi4py":
            raise ImportError("mpi4py is blocked")
sys.meta_path.insert(0, Block())
"""


def test_load_without_mpi4py(folder):
    """`mpidist.load` and the command work where mpi4py is not installed."""
    code = BLOCKED + (
        "import mpidist as md\n"
        "state = md.load(sys.argv[1])\n"
        "print(state['step'], state['parameters']['w'].shape)\n"
        "from mpidist.cli.main import main\n"
        "code = main(['checkpoint', 'verify', sys.argv[1]])\n"
        "assert not code, code\n"
        "assert 'mpi4py' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "1200 (50, 7)"
    assert done.stdout.count("good, ") == 2


def test_the_command_itself(folder):
    """``python -m mpidist checkpoint show`` as a user types it, and its exit codes."""
    command = [sys.executable, "-m", "mpidist", "checkpoint"]
    done = subprocess.run(
        [*command, "show", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "parameters/w" in done.stdout
    done = subprocess.run(
        [*command, "list", str(folder / "none")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_a_shard_reads_like_any_other_hdf5_file(tmp_path):
    """h5py opens it, finds names, dtypes and the piece's place, and the numbers are there."""
    store = two_ranks(tmp_path, [1])
    whole = {}
    for path in sorted(Path(store).rglob("shard-*.h5")):
        with h5py.File(path, "r") as file:
            for dataset in file.values():
                assert dataset.chunks is None
                assert dataset.attrs["name"] == "parameters/w"
                start = int(dataset.attrs["flat_start"])
                whole[start] = dataset[...]
                assert list(dataset.attrs["global_shape"]) == [8, 3]
    from checkpoint_solo import split_state

    joined = np.concatenate([whole[start] for start in sorted(whole)])
    assert equal(joined.reshape(8, 3), split_state(1)["parameters"]["w"])


# --------------------------------------------------------------------------------- histories


def test_histories(folder, call, tmp_path):
    """Issue 10: ``list`` shows the branches, and the others take ``--history``."""
    with CheckpointStore(Solo(), folder) as store:
        store.restore(step=100)
        store.save(200, state_of(200))
    with CheckpointStore(Solo(), folder, fresh=True) as store:
        store.save(5, state_of(5))
    code, out, _ = call("list", folder)
    assert code == 0
    assert [line.split("  ")[0].strip() or line.split()[0] for line in out.splitlines()[1:]] == [
        "history 0:", "100", "1200",
        "history 1, after step 100 of history 0:", "200",
        "history 2, the newest:", "5",
    ]  # fmt: skip
    assert "step 5 " in call("show", folder)[1]
    assert "step 1200 " in call("show", folder, "--history", 0)[1]
    code, _, said = call("show", folder, "--step", 200)
    assert (code, "; history=1 has it" in said) == (2, True)
    assert call("verify", folder)[1].count("good, ") == 4
    assert "step 200 of history 1: good" in call("verify", folder, "--history", 1)[1]
    assert call("export", folder, tmp_path / "x.npz", "--history", 1)[1].startswith("step 200 of")
    assert call("index", folder, "--history", 0, "--step", 100)[0] == 0
    code, _, said = call("show", folder, "--history", 9)
    assert code == 2
    assert "no history 9 in" in said
    assert "histories there: [0, 1, 2]" in said
    for action in ("list", "verify"):
        code, _, said = call(action, "s3://bucket/c")
        assert (code, "is an address of 's3'" in said) == (2, True)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, True),
        ({"MPIDIST_LAUNCHER": "host 12 34", "MPIDIST_ATTEMPT": "3"}, "host 12 34"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "7.0"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}, "7.0"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290"}, True),  # a shell of salloc
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}, True),
    ],
)
def test_the_name_of_a_beginning(environ, name):
    """``mpidist train --fresh``: an attempt that comes later goes on with what the first began."""
    assert beginning(environ) == name


def test_a_requeued_job_does_not_begin_anew():
    for more in ({}, {"MPIDIST_LAUNCHER": "host 12 34"}):
        with pytest.raises(ConfigError, match="--fresh: this job was requeued"):
            beginning({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", **more})
