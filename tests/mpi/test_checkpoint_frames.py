"""Count the frames of mpidist on the stack while checkpoint data are written, read or sent."""

import itertools
import os
from pathlib import Path

import frames
import numpy as np
import pytest
from frames import Recorded, recorded

import mpidist as md

SAVE, RESTORE = 6, 8


@pytest.fixture
def notes(monkeypatch):
    """What is called with the files of shards is noted as well, in whatever thread."""

    def noting(name):
        call = getattr(os, name)

        def noted(descriptor, *args):
            if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".h5":
                frames.note(name)
            return call(descriptor, *args)

        return noted

    for name in ("pwrite", "preadv", "fsync"):
        monkeypatch.setattr(os, name, noting(name))


def of_data(found: list) -> list:
    """Without the rounds of control, which `run_on_all` makes."""
    return [note for note in found if not any("rounds." in step for step in note.way)]


def state_of(comm, value: float) -> dict:
    part = np.full((300, 40), float(value + comm.rank))
    return {
        "w": np.full(70_000, float(value)),
        "b": np.full(3, float(value)),
        "m": md.Shard(part, (300 * comm.size, 40), (300 * comm.rank, 0)),
    }


def hold(comm, found: list, most: int, *calls: str) -> None:
    """Some rank made each of `calls`, none is deeper than that."""
    found = of_data(found)
    deep = [note for note in found if len(note.way) > most]
    everyone = comm.allgather((deep, {note.call for note in found}))
    assert not any(deep for deep, _ in everyone), everyone
    assert {*calls} <= {*itertools.chain(*(made for _, made in everyone))}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("writers", ["all", 1])
def test_frames(comm, folder, notes, writers):
    alone = Recorded(comm.Dup())
    try:
        with md.CheckpointStore(alone, folder, writers=writers, keep=None) as store:
            calls = ["pwrite", "fsync", *([] if writers == "all" else ["Irecv", "Isend"])]
            for save in (store.save, store.save_async):
                for step in (1, 2):
                    with recorded() as found:
                        save(step, state_of(comm, step))
                        store.wait()
                    hold(comm, found, SAVE, *calls)
            like = state_of(comm, 0)
            with recorded() as found:
                assert store.restore(like)[0] == 2
            hold(comm, found, RESTORE, "preadv", "Ibcast")
            assert (like["w"] == 2).all()
            with recorded() as found:
                store.restore({"w": np.zeros(70_000), "b": np.zeros(3), "m": np.zeros((900, 40))})
            hold(comm, found, RESTORE, "preadv", "Ibcast")
            with recorded() as found:
                store.restore()
            hold(comm, found, RESTORE, "preadv", "Ibcast")
        md.free(alone)
    finally:
        alone.Free()
