"""Histories: an older branch never replaces a newer one, even after a kill (issue 10)."""

import shutil
import signal

import numpy as np
import pytest
from checkpoint_solo import Solo, equal, resumed, state_of
from test_checkpoint_crash import in_child, kill_at
from test_checkpoint_golden import GOLDEN

import mpidist as md
from mpidist.checkpoint import histories
from mpidist.checkpoint.load import load_step
from mpidist.checkpoint.storage import files, retention
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import CheckpointError, ConfigError, NoCheckpoint


def store_of(folder, *steps, **options):
    """Open a store and save these steps, each with a state of its own number."""
    store = CheckpointStore(Solo(), folder, **options)
    for step in steps:
        store.save(step, state_of(step))
    return store


def is_saved(found, step, seed):
    return found[0] == step and equal(found[1], state_of(seed))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------ an older run does not win


def test_a_first_save_that_continues_nothing_is_refused(tmp_path):
    """3000 of the last run would win over 10 of this one, and keep= remove this one's."""
    store_of(tmp_path, 1000, 2000, 3000).close()
    before = names(tmp_path)
    with CheckpointStore(Solo(), tmp_path) as store:
        for method in (store.save, store.save_async):
            with pytest.raises(CheckpointError, match=r"up to 3000, .*restore\(\).*fresh=True"):
                method(10, state_of(10))
        assert store.restore()[0] == 3000
        store.save(3010, state_of(10))
    assert names(tmp_path) == [*before[1:], "step-000000003010"]


@pytest.mark.parametrize("method", ["save", "save_async"])
def test_a_fresh_store_sets_aside_what_is_there(tmp_path, method):
    store_of(tmp_path, 1000, 2000, 3000).close()
    with CheckpointStore(Solo(), tmp_path, fresh=True) as store:
        assert store.latest_step() is None
        assert store.all_steps() == []
        with pytest.raises(NoCheckpoint, match="fresh=True ignores"):
            store.restore()
        assert md.load(tmp_path)["step"] == 3000, "until this store has saved"
        for step in (10, 20, 30, 40):
            getattr(store, method)(step, state_of(step))
        store.wait()
        assert store.restore()[0] == 40
        assert store.all_steps() == [20, 30, 40]
    assert md.load(tmp_path)["step"] == 40
    with CheckpointStore(Solo(), tmp_path) as store:
        assert store.latest_step() == 40
        assert store.all_steps(history=0) == [1000, 2000, 3000]
        assert is_saved(store.restore(history=0), 3000, 3000)
        assert equal(store.restore(step=2000, history=0)[1], state_of(2000))
        with pytest.raises(NoCheckpoint, match=r"no history 7 in .*; histories there: \[0, 1\]"):
            store.all_steps(history=7)
    assert equal(md.load(tmp_path, history=0), state_of(3000))
    with pytest.raises(NoCheckpoint, match=r"steps there: \[20, 30, 40\]; history=0 has it"):
        md.load(tmp_path, 3000)


def test_going_back_begins_a_branch(tmp_path):
    """After ``restore(step=900)`` and a save of 950 a restart takes 950, not 1000."""
    store_of(tmp_path, 800, 900, 1000).close()
    with CheckpointStore(Solo(), tmp_path, keep=3) as store:
        store.restore(step=900)
        store.save(950, state_of(950))
        assert store.latest_step() == 950
        assert store.all_steps() == [800, 900, 950]
        assert store.all_steps(history=0) == [800, 900, 1000]
    for step in (960, 970, 980):
        with resumed(tmp_path, keep=3) as store:
            assert store.latest_step() == store.restore()[0] < step
            store.save(step, state_of(step))
    assert md.load(tmp_path)["step"] == 980
    with CheckpointStore(Solo(), tmp_path) as store:
        assert store.all_steps() == [960, 970, 980], "retention follows the branch"
        assert store.all_steps(history=0) == [1000], "what was left stays"
        assert equal(store.restore(history=0)[1], state_of(1000))
        store.save(1010, state_of(1010))  # of history 2, after history 0
        assert store.all_steps() == [1000, 1010]
        assert store.all_steps(history=1) == [960, 970, 980]
        with pytest.raises(NoCheckpoint, match="history=1 has it"):
            store.restore(step=970)


def test_keep_every_follows_the_branch(tmp_path):
    store_of(tmp_path, 100, 150, 200, 250, keep=None).close()
    with CheckpointStore(Solo(), tmp_path, keep=1, keep_every=100) as store:
        store.restore(step=150)
        for step in (160, 200, 300, 310):
            store.save(step, state_of(step + 1))
        assert store.all_steps() == [100, 150, 200, 300, 310]  # 150 was restored
        assert equal(store.restore(step=200)[1], state_of(201))
        assert store.all_steps(history=0) == [100, 150, 200, 250]


def test_a_lower_number_begins_a_branch(tmp_path):
    """A loop that goes back by itself: what it saves last is what a restart takes."""
    with store_of(tmp_path, 1, 2, 3) as store:
        store.save(2, state_of(7))
        assert store.all_steps() == [1, 2]
        assert is_saved(store.restore(), 2, 7)
        store.save(0, state_of(0))
        assert store.all_steps() == [0]
        assert store.all_steps(history=0) == [1, 2, 3]


def test_where_nothing_is_good_nothing_is_refused(tmp_path, capfd):
    """Damaged steps are no reason: a new history begins beside them, whatever their numbers."""
    store_of(tmp_path, 10, 20).close()
    for shard in tmp_path.glob("step-*/shard-00000.h5"):
        shard.unlink()
    with resumed(tmp_path) as store:
        store.save(5, state_of(5))
    assert md.load(tmp_path)["step"] == 5
    assert "step-000000000005-h1" in names(tmp_path)
    capfd.readouterr()


def test_past_a_damaged_step_the_next_save_is_the_newest(tmp_path, capfd):
    store_of(tmp_path, 10, 20).close()
    (tmp_path / "step-000000000020" / "shard-00000.h5").unlink()
    with resumed(tmp_path) as store:
        store.save(15, state_of(15))
    capfd.readouterr()
    assert md.load(tmp_path)["step"] == 15
    assert capfd.readouterr().err == ""


def test_stores_of_before_are_one_history(tmp_path):
    """Whatever their age: format 1, steps that were saved again."""
    folder = tmp_path / "store"
    shutil.copytree(GOLDEN / "format-1", folder)
    (folder / "step-000000000007").rename(folder / "step-000000000007.2")
    assert histories.all_steps(str(folder)) == [7, 14]
    with resumed(folder) as store:
        store.save(15, state_of(15))
        assert store.all_steps() == [7, 14, 15]
    assert [name for name in names(folder) if not name.startswith("step-")] == []


def test_a_beginning_has_a_name(tmp_path):
    """An attempt that comes later goes on with what the first of its run has begun."""
    for path in (tmp_path / "new", tmp_path / "old"):
        if path.name == "old":
            store_of(path, 1000).close()
        for attempt in range(3):
            with CheckpointStore(Solo(), path, fresh="run 7") as store:
                if attempt == 1:
                    assert store.all_steps() == [], "the first one has saved nothing"
                if attempt == 2:
                    assert store.restore()[0] == 10
                if attempt > 0:
                    store.save(10 * attempt, state_of(attempt))
        with CheckpointStore(Solo(), path) as store:
            assert store.all_steps() == [10, 20]
        with CheckpointStore(Solo(), path, fresh="run 8") as store:
            assert store.latest_step() is None


def test_a_step_that_is_there_twice_counts_once(tmp_path):
    """A save that was killed before it removed what it replaces: `keep` is of steps."""
    store_of(tmp_path, 1, 2, 3).close()
    shutil.copytree(tmp_path / "step-000000000003", tmp_path / "step-000000000003.1")
    with resumed(tmp_path, keep=3) as store:
        store.save(4, state_of(4))
        store.wait()
        assert names(tmp_path)[1:] == [
            "step-000000000002", "step-000000000003.1", "step-000000000004",
        ]  # fmt: skip


def test_delete(tmp_path):
    with store_of(tmp_path, 1, 2, 3) as store:
        store.restore(step=2)
        store.save(3, state_of(8))
        assert store.all_steps(history=0) == [1, 2, 3]
        store.delete(3)
        assert equal(store.restore()[1], state_of(3)), "the history of before is the newest again"
        store.delete(3, history=0)
        assert store.all_steps() == [1, 2]
        for step in (3, 7):
            with pytest.raises(NoCheckpoint, match=f"no checkpoint of step {step} in"):
                store.delete(step)
        with pytest.raises(ConfigError, match="step=None"):
            store.delete(None)
        store.save(4, state_of(4))
        with pytest.raises(NoCheckpoint):
            store.delete(2, history=9)
        with CheckpointStore(Solo(), tmp_path) as other:
            other.delete(4)
        assert store.latest_step() == 2


# ---------------------------------------------------------------------------------------- on disk


def test_marks_go_with_the_last_step_that_needs_them(tmp_path):
    with store_of(tmp_path, 1, 2, keep=2) as store:
        for step in (3, 4):
            store.restore(step=1, history=0)
            store.save(step, state_of(step))
        marks = [f"history-{number}-after-0-step-1" for number in (1, 2)]
        assert names(tmp_path)[1:3] == marks
        store.delete(3, history=1)
        store.save(5, state_of(5))
        store.wait()
        assert names(tmp_path)[1:2] == marks[1:]
        assert store.all_steps() == [1, 4, 5]


def test_a_failed_beginning_is_tried_again(tmp_path, monkeypatch):
    """Its mark is used by the next one that begins alike, and no other is made."""
    store_of(tmp_path, 1).close()
    with CheckpointStore(Solo(), tmp_path, fresh=True) as store:
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_at", lambda *_: 1 / 0)
            with pytest.raises(CheckpointError):
                store.save(1, state_of(2))
        assert md.load(tmp_path)["step"] == 1
        store.save(1, state_of(2))
    assert names(tmp_path) == ["history-1", "step-000000000001", "step-000000000001-h1"]


@pytest.mark.parametrize(
    ("back", "after"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.exhaustive),
        pytest.param(True, False, marks=pytest.mark.exhaustive),
    ],
)
def test_kill_at_every_call_of_a_beginning(tmp_path, monkeypatch, back, after):
    """The newest of before, or the first of the new history; and the next attempt goes on."""
    monkeypatch.setattr(retention, "PATIENCE_SECONDS", -1.0)
    number, ended, seen = 0, signal.SIGKILL, []
    while ended == signal.SIGKILL:
        number += 1
        folder = tmp_path / str(number)
        store_of(folder, 10, 20, 30, keep=2).close()

        def work(folder=folder, number=number):
            store = CheckpointStore(Solo(), folder, keep=2, fresh=not back)
            if back:
                store.restore(step=20)
            kill_at(number, after)
            store.save(25, state_of(25))
            store.close()

        ended = in_child(work)
        step, state = load_step(folder)
        assert step in (25, 30)
        seen.append(step)
        assert equal(state, state_of(step))
        assert {20, 30} <= set(histories.all_steps(str(folder), 0)) | {25}
        with resumed(folder, keep=2) as store:
            assert store.latest_step() == step
            store.save(step + 1, state_of(1))
            assert store.latest_step() == step + 1
            assert [step, step + 1] == store.all_steps()[-2:]
    assert seen == sorted(seen, reverse=True)
    assert seen.count(30) > 10
    assert seen.count(25) > 1


def test_a_folder_of_a_high_number_hides_nothing(tmp_path):
    """Line 9 of issue 10: one named ``.999999`` made the next save of its step invisible."""
    for name in ("step-000000000005.999999", "step-000000000005-h0", "step-000000000005-h1.x"):
        (tmp_path / name).mkdir()
    with store_of(tmp_path, 5) as store:
        assert store.all_steps() == [5]
        store.save(5, state_of(6))
        assert is_saved(store.restore(), 5, 6)
    assert is_saved(load_step(tmp_path), 5, 6)


def test_names_alone_say_what_is_newest(tmp_path, monkeypatch):
    """However many steps there are, a look at the newest opens its folder and no other."""
    with store_of(tmp_path, 1, 3) as store:
        for step in range(10, 300):
            shutil.copytree(tmp_path / "step-000000000001", tmp_path / f"step-{step:012d}-h2")
        (tmp_path / "step-000000000500-h2").mkdir()  # a removal was interrupted here
        shutil.copytree(tmp_path / "step-000000000003", tmp_path / "step-000000000003-h3")
        (tmp_path / "history-3-after-2-step-200").touch()
        opened, real = [], files.folder

        def folder(name, root=None):
            opened.append(str(name))
            return real(name, root)

        monkeypatch.setattr(files, "folder", folder)
        for look in (store.latest_step, store.restore, lambda: md.load(tmp_path)):
            opened.clear()
            look()
            assert {name for name in opened if name.startswith("step-")} == {"step-000000000003-h3"}
        assert len(store.all_steps()) == 192


@pytest.mark.parametrize("given", ["s3://bucket/c", "file:///c", "gs:/bucket", "", b"", b"s3://b"])
def test_addresses_are_no_folders(tmp_path, monkeypatch, given):
    """Line 5 of issue 10: it was a folder of that name in the current one."""
    monkeypatch.chdir(tmp_path)
    said = "expected a path" if not given else "is an address of '(s3|gs|file)'; expected a path"
    for work in (
        lambda: CheckpointStore(Solo(), given),
        lambda: md.load(given),
        lambda: md.wait_for_step(given, timeout=0),
    ):
        with pytest.raises(ConfigError, match=said):
            work()
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_colon_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with store_of("run:3/c:", 1):
        assert np.isfinite(md.load("./run:3/c:")["scalar"])
