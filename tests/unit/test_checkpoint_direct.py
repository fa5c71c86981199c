"""Writes that bypass the system's cache: equal bytes, also where the file system refuses them."""

import errno
import fcntl
import hashlib
import json
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoint_solo import Solo, equal, no_more_threads, state_of

from mpidist.checkpoint.format.manifest import NAME
from mpidist.checkpoint.load import load_step
from mpidist.checkpoint.storage import files
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import CheckpointError, NoCheckpoint

ROWS = 9000  # 650 KiB in all, with an end that is no whole page


@pytest.fixture
def pages(monkeypatch):
    """Blocks of one page, four at once: a shard is many writes and reads."""
    monkeypatch.setattr(files, "BLOCK", files.PAGE)


@pytest.fixture
def asked(monkeypatch):
    """What each file was asked to do, and whether it did: (on, answer) pairs."""
    found = []
    original = files.set_direct_io

    def spy(descriptor, on):
        found.append((on, original(descriptor, on)))
        return found[-1][1]

    monkeypatch.setattr(files, "set_direct_io", spy)
    return found


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def shards(folder):
    return {path.name: path.read_bytes() for path in folder.glob("step-*/shard-*")}


def come_back(folder):
    """Save, restore and check; returns the bytes of the shard and its table."""
    state = state_of(1, ROWS)
    with CheckpointStore(Solo(), folder) as store:
        store.save(1, state)
        like = state_of(9, ROWS)
        assert equal(store.restore(like)[1], state)
        assert equal(like["momentum"], state["momentum"])
        store.verify(1)
    assert equal(load_step(folder)[1], state)
    return shards(folder)


@pytest.mark.usefixtures("pages")
def test_the_same_bytes_past_the_cache_and_through_it(tmp_path, asked):
    """Issue 4: the way to the disk changes no bit of what is there."""
    one = come_back(tmp_path / "direct")
    if (True, True) not in asked:
        pytest.skip("this file system has no O_DIRECT")
    asked.clear()
    with CheckpointStore(Solo(), tmp_path / "cached", direct=False) as store:
        store.save(1, state_of(1, ROWS))
        assert equal(store.restore()[1], state_of(1, ROWS))
    assert not any(on for on, _ in asked)
    assert shards(tmp_path / "cached") == one


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("when", ["asked", "read or written"])
def test_a_file_system_that_refuses(tmp_path, monkeypatch, when):
    """Some refuse when asked, some at the first byte: both go through the cache, unnoticed."""
    usual = come_back(tmp_path / "usual")
    refused = []

    def refusing(call):
        def go(descriptor, *args):
            if is_direct(descriptor):
                refused.append(call)
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(descriptor, *args)

        return go

    def control(descriptor, command, *args):
        if command == fcntl.F_SETFL and args[0] & os.O_DIRECT:
            refused.append(command)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fcntl.fcntl(descriptor, command, *args)

    if when == "asked":
        monkeypatch.setattr(files, "fcntl", _Fcntl(control))
    else:
        monkeypatch.setattr(os, "pwrite", refusing(os.pwrite))
        monkeypatch.setattr(os, "preadv", refusing(os.preadv))
    assert come_back(tmp_path / "refused") == usual
    assert refused


class _Fcntl:
    """The module fcntl with another function of that name."""

    def __init__(self, control):
        self.fcntl = control

    def __getattr__(self, name):
        return getattr(fcntl, name)


@pytest.mark.usefixtures("pages")
def test_in_memory(tmp_path):
    """A tmpfs, whatever it says to O_DIRECT."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        assert come_back(Path(shared)) == come_back(tmp_path)


@pytest.mark.usefixtures("pages")
def test_writes_and_reads_that_end_early(tmp_path, monkeypatch):
    """A call may do less than it was asked for, and go on where no page begins."""
    usual = come_back(tmp_path / "usual")
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda d, data, at: write(d, data[:5000], at))
    monkeypatch.setattr(os, "preadv", lambda d, views, at: read(d, [views[0][:5000]], at))
    assert come_back(tmp_path / "early") == usual


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("method", ["save", "save_async"])
@pytest.mark.parametrize("number", [1, 2, 20])
def test_a_write_that_fails_in_its_thread(tmp_path, monkeypatch, number, method):
    """A full disk is told by the save, and nothing of it remains; the next one is whole."""
    original, calls = files.write_at, []

    def fill_up(descriptor, data, offset):
        if threading.current_thread().name == "mpidist-write":
            calls.append(offset)
            if len(calls) == number:
                raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor, data, offset)

    with CheckpointStore(Solo(), tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_at", fill_up)
            with pytest.raises(CheckpointError, match="No space left"):  # noqa: PT012
                getattr(store, method)(1, state_of(1, ROWS))
                store.wait()
        assert len(calls) == number  # nothing is written behind a hole
        assert not list(tmp_path.glob("*step*"))
        getattr(store, method)(2, state_of(2, ROWS))
        assert equal(store.restore()[1], state_of(2, ROWS))


@pytest.mark.usefixtures("pages")
def test_a_restore_without_more_threads(tmp_path, monkeypatch):
    """Fewer read then."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1, ROWS))

        no_more_threads(monkeypatch)
        assert equal(store.restore(state_of(2, ROWS))[1], state_of(1, ROWS))


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("where", [0.01, 0.5, 0.9])
def test_damage_that_a_thread_finds(tmp_path, where):
    """The error is that of the block, whoever has read it, and no thread reads on."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1, ROWS))
        path = next(tmp_path.glob("step-*/shard-00000.h5"))
        data = bytearray(path.read_bytes())
        data[int(where * len(data))] ^= 16
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="fail their checksum"):
            store.restore(state_of(9, ROWS))
    assert "mpidist-read" not in [thread.name for thread in threading.enumerate()]


def test_a_restore_that_trusts_the_disk(tmp_path):
    """Issue 4: without verification numbers are not looked at; tables and sizes still are."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, {"w": np.arange(1000.0)})
        path = next(tmp_path.glob("step-*/shard-00000.h5"))
        data = path.read_bytes()
        at = data.index(np.arange(1000.0).tobytes())
        path.write_bytes(data[:at] + b"\1" + data[at + 1 :])
        found = store.restore(verify=False)[1]["w"]
        assert found[0] == np.frombuffer(b"\1" + bytes(7))[0]
        assert (found[1:] == np.arange(1.0, 1000.0)).all()
        path.write_bytes(data[:-1])
        with pytest.raises(NoCheckpoint, match="bytes, the manifest says"):
            store.restore(verify=False)
        path.write_bytes(data)
        table = path.with_suffix(".table")
        good = table.read_bytes()
        for at in (good.index(b"crc32"), -1):  # in its head, and in its pieces
            forged = bytearray(good)
            forged[at] ^= 1
            table.write_bytes(forged)
            with pytest.raises(NoCheckpoint, match=r"shard-00000\.table"):
                store.restore(verify=False)


@pytest.mark.usefixtures("pages")
def test_the_digest_of_a_shard(tmp_path):
    """On request a table keeps what sha256sum says of its shard, and verify compares it."""
    with CheckpointStore(Solo(), tmp_path, sha256=True) as store:
        store.save(1, state_of(1, ROWS))
        store.verify(1)
        folder = tmp_path / "step-000000000001"
        shard = (folder / "shard-00000.h5").read_bytes()
        head, pieces = (folder / "shard-00000.table").read_bytes().split(b"\n", 1)
        table = json.loads(head)
        assert table["sha256"] == hashlib.sha256(shard).hexdigest()
        assert equal(store.restore()[1], state_of(1, ROWS))
        _forge(folder, {**table, "sha256": "0" * 64}, pieces)
        with pytest.raises(CheckpointError, match="fails its SHA-256"):
            store.verify(1)


def _forge(folder, table, pieces):
    """Put another head on the table of a shard, and right digests of table and manifest."""

    def encode_digested(body, last):
        body.pop(last)
        head = json.dumps(body)[:-1].encode()
        return head + f',"{last}":"{hashlib.sha256(head).hexdigest()}"}}\n'.encode()

    head = encode_digested(table, "digest")
    (folder / "shard-00000.table").write_bytes(head + pieces)
    body = json.loads((folder / NAME).read_bytes())
    size, digest = len(head + pieces), hashlib.sha256(head).hexdigest()
    body["tables"][0].update(size=size, sha256=digest)
    (folder / NAME).write_bytes(encode_digested(body, "sha256"))
