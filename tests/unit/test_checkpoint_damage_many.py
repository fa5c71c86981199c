"""In thousands of cases of damage, a load gives the right bits or the step before, in both formats.

The cases are 2,000 flipped bits and 500 truncated files among manifests, tables and shards. In
other cases, a file of a step is deleted, or replaced by any other file, also one of another job.
`load` and a restore read the cases in turn, and open no file outside of the store.
"""

import hashlib
import os
import random
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoint_solo import Solo, equal, split_state, state_of, two_ranks
from test_checkpoint_golden import GOLDEN, golden_state

from mpidist.checkpoint import histories, load
from mpidist.checkpoint.format.digested_json import Damaged, decode_digested
from mpidist.checkpoint.format.manifest import NAME
from mpidist.checkpoint.storage import files
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import NoCheckpoint

#: In the first tier, and beside them in all cases.
FLIPS, TRUNCATIONS = (400, 1600), (100, 400)
KINDS = ("one rank", "two ranks", "format 1", "format 2")


def make(kind, folder, numbers=(1, 2)):
    """Write a store with two steps: {step: state}."""
    if kind.startswith("format"):
        shutil.copytree(GOLDEN / kind.replace(" ", "-"), folder)
        return {step: golden_state(step) for step in (7, 14)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpidist.checkpoint.storage.files.BLOCK", 256)  # few bytes are many blocks
        if kind == "two ranks":
            two_ranks(folder, numbers)
            return {step: split_state(step) for step in numbers}
        with CheckpointStore(Solo(), folder) as store:
            for step in numbers:
                store.save(step, state_of(step, rows=20))
    return {step: state_of(step, rows=20) for step in numbers}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def store(kind, tmp_path):
    """(Folder of a store, its states by step, the files of the newest step.)"""
    folder = tmp_path / "store"
    states = make(kind, folder)
    return folder, states, sorted((folder / f"step-{max(states):012d}").iterdir())


@pytest.fixture(autouse=True)
def opened(monkeypatch):
    """Every path that is opened, whatever it is relative to."""
    found, original = [], os.open

    def record(path, flags, mode=0o777, *, dir_fd=None):
        where = "" if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        found.append(Path(where, path))
        return original(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", record)
    return found


def outcome(folder, states, by_load=True):
    """Read the newest good step; its number, having checked each bit."""
    if by_load:
        step, state = load.load_step(folder)
    else:
        with CheckpointStore(Solo(), folder) as store:
            step, state = store.restore()
    assert equal(state, states[step])
    return step


@contextmanager
def changed(path, data):
    """A file with other bytes, or without a file where they are None."""
    good = path.read_bytes()
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(good)


def check(folder, states, opened, number, missing=False):
    """One case: read, and found by `verify` unless the step is no checkpoint any more."""
    opened.clear()
    step = outcome(folder, states, number % 2 == 0)
    assert opened
    assert all(path.absolute().resolve().is_relative_to(folder) for path in opened), opened
    if missing:
        assert step == min(states)
    else:
        entry = histories.first(folder)
        assert entry.step == max(states)
        assert load.damages(str(folder), entry)[0]
    return step


def cases(counts):
    few, others = counts
    return pytest.mark.parametrize(
        "count", [few, pytest.param(others, marks=pytest.mark.exhaustive)]
    )


@cases(FLIPS)
def test_flipped_bits(store, kind, opened, count):
    folder, states, paths = store
    rng, used = random.Random(count), set()
    for n in range(-(-count // len(KINDS))):
        path = paths[n % len(paths)]
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with changed(path, data):
            used.add(check(folder, states, opened, n))
    # Blocks that no array needs are not read; the old files are of one block each.
    assert used == ({7} if kind.startswith("format") else set(states))
    assert outcome(folder, states) == max(states)


@cases(TRUNCATIONS)
def test_truncated_files(store, opened, count):
    folder, states, paths = store
    rng = random.Random(count)
    for n in range(-(-count // len(KINDS))):
        path = paths[n % len(paths)]
        data = path.read_bytes()
        size = (0, len(data) - 1, rng.randrange(len(data)))[min(n // len(paths), 2)]
        with changed(path, data[:size]):
            assert check(folder, states, opened, n) == min(states)


def test_deleted_swapped_and_foreign_files(store, kind, opened, tmp_path):
    """Each file gone, or replaced by each other file of the store and of another job's."""
    folder, states, paths = store
    other = tmp_path / "other"
    if kind.startswith("format"):
        make("two ranks", other, (7, 14))
    else:
        make(kind, other, (2, 3))  # the same shapes, and a step of the same number
    sources = {path.read_bytes() for path in [*folder.rglob("*.*"), *other.rglob("*.*")]
               if path.is_file()}  # fmt: skip
    for path in paths:
        good = path.read_bytes()
        with changed(path, None):
            assert check(folder, states, opened, 0, path.name == NAME) == min(states)
        for n, data in enumerate(sorted(sources - {good})):
            with changed(path, data):
                assert check(folder, states, opened, n) == min(states)
    assert outcome(folder, states) == max(states)


def test_swapped_names(store, opened):
    """Two files of one step change names, each pair."""
    folder, states, paths = store
    for i, one in enumerate(paths):
        for two in paths[:i]:
            a, b = one.read_bytes(), two.read_bytes()
            with changed(one, b), changed(two, a):
                assert check(folder, states, opened, i) == min(states)


def test_duplicated_keys(store, opened):
    """In manifests and tables, whose digest is made right again: the second would count."""
    folder, states, paths = store
    for path in paths:
        if path.suffix in (".json", ".table"):
            last = "sha256" if path.name == NAME else "digest"
            head, rest = path.read_bytes().split(b"\n", 1)
            good = head + b"\n"
            body = good[: good.rindex(b',"' + last.encode())]
            head = b'{"version":1,' + body[1:]
            forged = head + f',"{last}":"{hashlib.sha256(head).hexdigest()}"}}\n'.encode()
            with pytest.raises(Damaged, match="key twice"):
                decode_digested(forged, path.name, last)
            with changed(path, forged + rest):
                assert check(folder, states, opened, 0) == min(states)


def test_nothing_good_is_an_error(store):
    """Both steps damaged in each kind of file: NoCheckpoint, never arrays."""
    folder, states, paths = store
    for path in paths:
        older = folder / f"step-{min(states):012d}" / path.name
        with changed(path, b""), changed(older, older.read_bytes()[:-1]):
            with pytest.raises(NoCheckpoint):
                load.load(folder)
            with CheckpointStore(Solo(), folder) as one, pytest.raises(NoCheckpoint):
                one.restore()


def test_a_file_that_goes_while_the_folder_is_measured(tmp_path, monkeypatch):
    """Rank 0 waits for tables by the size of the folder; a table gets its name just then."""
    for name in ("shard-00000.part", "shard-00001.h5"):
        (tmp_path / name).write_bytes(b"123")
    original = os.scandir

    @contextmanager
    def late(where):
        with original(where) as entries:
            found = list(entries)
            (tmp_path / "shard-00000.part").unlink()
            yield found

    monkeypatch.setattr(os, "scandir", late)
    with files.folder(str(tmp_path)) as folder:
        assert files.total_size(folder) == 3


CHILD = """
import random, sys
from pathlib import Path
from mpidist.checkpoint.export.plain_file import export_step
from mpidist.checkpoint.export.index import index
from mpidist.errors import CheckpointError
folder, newest, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(7)
paths = sorted((folder / f"step-{newest:012d}").iterdir())
for n in range(int(sys.argv[3])):
    path = paths[n % len(paths)]
    good = path.read_bytes()
    data = bytearray(good)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    assert index(folder)[0] != newest
    try:
        index(folder, newest)
    except CheckpointError:
        pass
    else:
        raise AssertionError(path)
    for suffix in (".h5", ".npz"):
        out = folder / f"out{n}{suffix}"
        export_step(folder, out)
        out.unlink()
    path.write_bytes(good)
assert index(folder)[0] == newest
"""


@cases((12, 30))
def test_index_and_export_of_damaged_steps(store, count):
    """What writes and parses HDF5 runs in a child: it lives, and indexes nothing damaged."""
    folder, states, _ = store
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(max(states)), str(count)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
