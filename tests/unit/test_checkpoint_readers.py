"""A load beside a running job: a step that the job removes does not count as damaged (issue 10)."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoint_solo import Solo, equal, resumed, state_of
from test_cli_checkpoint import call  # noqa: F401

import mpidist as md
from mpidist.checkpoint import histories, load
from mpidist.checkpoint.export import index, plain_file
from mpidist.checkpoint.storage import files, steps
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import CheckpointError, ConfigError, NoCheckpoint

READERS = Path(__file__).parents[1] / "soak" / "readers.py"


@pytest.fixture
def saver(tmp_path):
    """A store with keep=1 and one step, as a job has it that goes on."""
    with CheckpointStore(Solo(), tmp_path / "store", keep=1) as store:
        store.save(1, state_of(1))
        yield store


@pytest.fixture
def meanwhile(saver, monkeypatch):
    """Let the job save its next step, and remove the last, as soon as somebody reads a step."""
    real = steps.read_manifest
    left = [1]

    def read_manifest(path, entry):
        found = real(path, entry)
        if left[0]:
            left[0] -= 1
            saver.save(entry.step + 1, state_of(entry.step + 1))
            saver.wait()
        return found

    monkeypatch.setattr(steps, "read_manifest", read_manifest)
    return left


def test_a_step_that_is_removed_meanwhile(saver, meanwhile, capfd):
    """The newest by then is read, and nothing is said of damage."""
    assert equal(md.load(saver.path), state_of(2))
    meanwhile[0] = 3
    assert equal(md.load(saver.path), state_of(5))
    with CheckpointStore(Solo(), saver.path) as reader:
        meanwhile[0] = 2
        assert reader.restore(state_of(50))[0] == 7
        meanwhile[0] = 1
        assert reader.verify() > 0
        assert not reader._keep.bad
    assert capfd.readouterr().err == ""
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 1 in"):
        md.load(saver.path, 1)


def test_programs_beside_a_job(saver, meanwhile, tmp_path, capfd):
    assert plain_file.export_step(saver.path, tmp_path / "out.npz") == 2
    meanwhile[0] = 1
    assert index.index(saver.path)[0] == 3
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("action", ["list", "show", "verify"])
def test_commands_beside_a_job(saver, meanwhile, call, action):  # noqa: F811
    code, out, err = call(action, saver.path)
    assert code == 0
    assert "damaged" not in out + err


def test_a_reader_that_never_comes_in_time(saver, meanwhile):
    meanwhile[0] = 1000
    with pytest.raises(CheckpointError, match=r"100 steps in .* were removed while they were read"):
        md.load(saver.path)


def test_names_that_are_missed(saver, monkeypatch):
    """A listing may miss the new name and the old one: it is believed when it is seen twice."""
    real, torn = files.folders_and_files, [2]

    def listed(where):
        folders, others = real(where)
        torn[0] -= 1
        return ([], [f".tmp-{torn[0]}"]) if torn[0] >= 0 else (folders, others)

    monkeypatch.setattr(files, "folders_and_files", listed)
    for look in (
        lambda: md.load(saver.path)["step"],
        saver.latest_step,
        lambda: saver.all_steps()[0],
    ):
        torn[0] = 2
        assert look() == 1


def test_what_is_damaged_is_still_said(saver, capfd):
    (Path(saver.path) / "step-000000000001" / "shard-00000.h5").unlink()
    with pytest.raises(NoCheckpoint, match="no good checkpoint"):
        md.load(saver.path)
    assert "damaged checkpoint passed over" in capfd.readouterr().err


# --------------------------------------------------------------------------------- wait_for_step


def test_wait_for_step(tmp_path):
    folder = tmp_path / "store"
    with pytest.raises(NoCheckpoint, match=f"no checkpoint in {folder} within 0 s"):
        md.wait_for_step(folder, timeout=0)

    def job():
        time.sleep(0.1)
        with CheckpointStore(Solo(), folder) as store:
            store.save(10, state_of(10))
            time.sleep(0.2)
            store.save(20, state_of(20))

    thread = threading.Thread(target=job)
    thread.start()
    try:
        assert md.wait_for_step(folder) == 10
        assert md.wait_for_step(folder, after=10, timeout=30) == 20
    finally:
        thread.join()
    assert md.wait_for_step(folder, after=10, timeout=0) == 20
    with pytest.raises(NoCheckpoint, match=f"no checkpoint but 20 in {folder} within 0.1 s"):
        md.wait_for_step(folder, after=20, timeout=0.1)
    with resumed(folder) as store:
        store.restore(step=10)
        store.save(15, state_of(15))
    assert md.wait_for_step(folder, after=20, timeout=0) == 15, "the run went back"
    for wrong in (-1, 1.5, "10"):
        with pytest.raises(ConfigError, match="after="):
            md.wait_for_step(folder, after=wrong)
    for wrong in (-1, float("nan"), "10"):  # NaN would be for ever
        with pytest.raises(ConfigError, match=r"timeout=.*; expected seconds"):
            md.wait_for_step(folder, after=15, timeout=wrong)


def test_loads_beside_a_saver():
    """`make soak-readers` does 100,000: each gets a whole step, and none a report of damage."""
    words = [sys.executable, str(READERS), "300"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 loads" in done.stdout
    assert histories.is_gone("/nowhere", steps.Entry(0, 1, 0)) is False
    assert load.count_removed("x", 3) == 4
