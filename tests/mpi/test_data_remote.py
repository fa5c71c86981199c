"""A remote file is copied once per node, with retries, limits, and never in part (R2, R130)."""

import os
import socket
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist import events
from mpidist.data.readers import remote
from mpidist.errors import ConfigError, MpidistError

fsspec = pytest.importorskip("fsspec")

CONTENT = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def url():
    """In memory, so every process has a store of its own: only leaders may need theirs."""
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/data.bin", CONTENT)
    yield "memory://bucket/data.bin"
    store.rm("/bucket", recursive=True)


def fetches():
    return sum(1 for event in events.recent if event[1] == "fetched")


@pytest.mark.ranks(1, 2, 4)
def test_once_per_node(comm, folder, url):
    """Two ranks to a node, each with its own disk: the leaders fetch, and only once."""
    events.recent.clear()
    disk = folder / f"node{comm.rank // 2}"
    for _ in range(2):
        path = remote.local_copy(comm, url, disk, ranks_per_node=2)
        assert path.read_bytes() == CONTENT
    assert comm.allgather(fetches()) == [1 - rank % 2 for rank in range(comm.size)]
    comm.Barrier()
    assert [file.name for file in disk.iterdir()] == [path.name]
    assert path.name.endswith("-data.bin")


@pytest.mark.ranks(2)
def test_tried_again_and_given_up(comm, folder, url, monkeypatch):
    calls, real = [], remote._copy

    def flaky(url, partial, bandwidth):
        calls.append(time.monotonic())
        if len(calls) < 3:
            partial.write_bytes(b"half")
            raise ConnectionError("reset by peer")
        real(url, partial, bandwidth)

    monkeypatch.setattr(remote, "_copy", flaky)
    path = remote.local_copy(comm, url, folder, wait=0.05)
    assert path.read_bytes() == CONTENT
    if comm.rank == 0:
        assert len(calls) == 3
        assert calls[1] - calls[0] >= 0.05
        assert calls[2] - calls[1] >= 0.1, "twice as long each time"
    comm.Barrier()
    calls.clear()
    with pytest.raises(MpidistError, match="reset by peer; tried 2 times"):
        remote.local_copy(comm, url + "?2", folder, tries=2, wait=0.01)
    comm.Barrier()
    assert [file.name for file in folder.iterdir()] == [path.name], "nothing half is left"


@pytest.mark.ranks(2)
def test_a_server_that_takes_calls_and_never_answers(comm, folder, monkeypatch):
    """A connection is no answer: tried again, given up, and heard of on all ranks."""
    monkeypatch.setattr(remote, "_SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = comm.bcast(f"http://127.0.0.1:{silent.getsockname()[1]}/records")
        began = time.monotonic()
        with pytest.raises(MpidistError, match="timed out; tried 2 times"):
            remote.local_copy(comm, url, folder, tries=2, wait=0.01)
        assert time.monotonic() - began < 30, "half of what is usual"
        comm.Barrier()
    assert list(folder.iterdir()) == []


@pytest.mark.ranks(1)
def test_short_answers_and_bandwidth(comm, folder, url, monkeypatch):
    now = [0.0]
    with monkeypatch.context() as patch:

        def sleep(seconds):
            now[0] += seconds

        patch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        remote.local_copy(comm, url, folder / "slow", bandwidth=1_000_000)
    assert now[0] == pytest.approx(0.3)
    real = remote._opened

    @contextmanager
    def longer(url):
        with real(url) as (file, size):
            yield file, size + 1

    monkeypatch.setattr(remote, "_opened", longer)
    with pytest.raises(MpidistError, match="300000 bytes came, expected 300001"):
        remote.local_copy(comm, url, folder / "short", tries=1)
    monkeypatch.setattr(remote, "_opened", real)
    with pytest.raises(MpidistError, match="FileNotFoundError"):
        remote.local_copy(comm, "memory://bucket/nothing", folder, tries=1)


@pytest.mark.ranks(1)
def test_a_copy_of_another_length_is_fetched_again(comm, folder, url):
    """The data were changed where they come from; one that cannot be asked for is believed."""
    path = remote.local_copy(comm, url, folder)
    fsspec.filesystem("memory").pipe("/bucket/data.bin", CONTENT[:1000])
    assert remote.local_copy(comm, url, folder).read_bytes() == CONTENT[:1000]
    fsspec.filesystem("memory").rm("/bucket/data.bin")
    assert remote.local_copy(comm, url, folder) == path
    assert path.exists()
    fsspec.filesystem("memory").pipe("/bucket/data.bin", CONTENT)


@pytest.mark.ranks(1, 2, 4)
def test_a_data_table_with_urls(comm, folder, url):
    """R2: values that are URLs, lists and patterns of them; all else stays what it is."""
    store = fsspec.filesystem("memory")
    store.pipe({"/bucket/b1.bin": b"one", "/bucket/b2.bin": b"two"})
    table = {
        "name": "made up", "path": url, "train": 7, "all": "memory://bucket/b*.bin",
        "both": ["memory://bucket/b2.bin", "/here"], "cache": str(folder / f"n{comm.rank // 2}"),
    }  # fmt: skip
    assert remote.is_remote(table)
    assert not remote.is_remote({"path": "/here", "names": ["a", "b"], "train": 3})
    here = remote.brought_here(comm, table, ranks_per_node=2)
    assert here.keys() == table.keys() - {"cache"}
    assert (here["name"], here["train"], here["both"][1]) == ("made up", 7, "/here")
    with open(here["path"], "rb") as file:  # noqa: PTH123
        assert file.read() == CONTENT
    contents = []
    for path in (*here["all"], here["both"][0]):
        with open(path, "rb") as file:  # noqa: PTH123
            contents.append(file.read())
    assert contents == [b"one", b"two", b"two"]
    with pytest.raises(ConfigError, match="all: cannot look up memory://bucket/c"):
        remote.brought_here(comm, {**table, "all": "memory://bucket/c*"}, ranks_per_node=2)


@pytest.mark.ranks(1)
def test_passwords_are_not_told(comm, folder):
    with pytest.raises(MpidistError) as caught:
        remote.local_copy(comm, "http://me:secret@127.0.0.1:9/a?key=secret", folder, tries=1)
    assert "cannot fetch http://127.0.0.1:9/a: " in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.ranks(1)
def test_copies_are_this_user_s_alone(comm, folder, url, monkeypatch):
    """Without cache= they are in the node's folder for temporary files, where anybody may write."""
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(folder))
    path = remote.brought_here(comm, {"path": url})["path"]
    own = folder / f"mpidist-data-{os.getuid()}"
    assert path.startswith(f"{own}/")
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(ConfigError, match="give another cache="):
        remote.brought_here(comm, {"path": url})
    own.rename(folder / "elsewhere")
    own.symlink_to(folder / "elsewhere")
    with pytest.raises(ConfigError, match="other users can write to"):
        remote.brought_here(comm, {"path": url})
