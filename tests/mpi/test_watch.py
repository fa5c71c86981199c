"""md.watch without a hang: its status board, and the arguments that it refuses."""

import os
import time
from pathlib import Path

import pytest

import mpidist as md
from mpidist.errors import ConfigError
from mpidist.runtime.status_board import RECORD, Board


@pytest.mark.ranks(1, 4)
def test_board_carries_every_rank_s_record(comm, tmp_path):
    for directory in (None, comm.bcast(str(tmp_path))):
        board = Board(comm, directory)
        assert board.read() == [None] * comm.size
        comm.Barrier()
        board.write({"rank": comm.rank, "where": "x" * 5000, "event": "y" * (comm.rank + 1)})
        comm.Barrier()
        records = board.read()
        assert [record["rank"] for record in records] == list(range(comm.size))
        assert [record["event"] for record in records] == ["y" * (r + 1) for r in range(comm.size)]
        assert all(100 < len(record["where"]) < RECORD for record in records)
        comm.Barrier()
        board.close(last=comm.rank == 0)
        comm.Barrier()
    assert os.listdir(comm.bcast(str(tmp_path))) == []  # noqa: PTH208


@pytest.mark.ranks(1, 3)
def test_a_closed_board_leaves_no_descriptor(comm):
    Board(comm).close()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        Board(comm).close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.ranks(3)
def test_a_torn_record_is_no_record(comm):
    board = Board(comm)
    board.write({"rank": comm.rank})
    comm.Barrier()
    if comm.rank == 1:
        os.pwrite(board.fd, b'{"rank": 1, "wh', RECORD)
    comm.Barrier()
    assert board.read() == [{"rank": 0}, None, {"rank": 2}]
    board.close()


@pytest.mark.ranks(1, 3)
def test_bad_arguments_on_all_ranks(comm):
    with pytest.raises(ConfigError, match="seconds=0"):
        md.watch(comm, seconds=0)
    with pytest.raises(ConfigError, match="pass directory="):
        md.watch(comm, directory="/no/such/folder")


@pytest.mark.ranks(3)
def test_the_folder_is_rank_0_s(comm, tmp_path):
    mine = Path(comm.bcast(str(tmp_path))) / str(comm.rank)
    mine.mkdir()
    board = Board(comm, mine)
    assert board.path.parent.name == "0"
    comm.Barrier()
    board.close(last=comm.rank == 0)
    comm.Barrier()
    assert list(mine.iterdir()) == []


@pytest.mark.ranks(3)
def test_a_folder_that_one_rank_cannot_see_is_refused(comm, tmp_path, monkeypatch):
    """As on hosts without a common file system; rank 0's file does not stay behind."""
    folder = Path(comm.bcast(str(tmp_path)))
    real = Path.stat

    def stat(path, **options):
        if comm.rank == 2 and path.name.startswith(".mpidist-watch"):
            raise FileNotFoundError(path)
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ConfigError, match=r"not all ranks see.*pass directory="):
        Board(comm, folder)
    comm.Barrier()
    assert list(folder.iterdir()) == []


@pytest.mark.ranks(2)
def test_watching_costs_next_to_nothing(comm):
    """A look, a write and a read take well under a millisecond of the interpreter's time."""
    with md.watch(comm, seconds=600) as watch:
        seconds = []
        for _ in range(50):
            begin = time.thread_time()
            watch._me.look(0.0)
            watch._publish()
            watch._board.read()
            seconds.append(time.thread_time() - begin)
        # The quicker half: whoever shares the core and its cache makes the others longer.
        assert sorted(seconds)[25] < 2e-3
