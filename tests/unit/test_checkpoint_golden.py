"""Checkpoints of earlier versions of mpidist can still be read.

mpidist 0.1.0 wrote the folders ``golden/format-1`` and ``format-2`` on two ranks. They have the
steps 7 and 14, with replicated arrays that were divided between the ranks, shards as boxes and as
flat ranges, and extras. These files must never be written again.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_solo import Solo, equal

import mpidist as md
from mpidist.checkpoint.store import CheckpointStore

GOLDEN = Path(__file__).parent / "golden"


def golden_state(step):
    return {
        "parameters": {
            "w": np.arange(60, dtype="f4").reshape(12, 5),
            "b": np.arange(7, dtype="f2"),
            "odd/name": np.array(3.5),
        },
        "optimizer": {
            # Both ranks' shards counted from 0 on where they begin.
            "m": np.concatenate(
                [np.arange(48).reshape(8, 6)[:3], np.arange(48).reshape(8, 6)[3:]]
            ).astype("f8"),
            "flat": np.arange(100, dtype="i8").reshape(10, 10),
        },
        "flags": np.array([True, False, True]),
        "empty": np.zeros((0, 3), "c8"),
        "text": np.array(["\u00e9", "abc"]),
        "data": {
            "epoch": 3,
            "offset": {7: 17, 14: 34}[step],
            "name": "x",
            "list": [1, 2.5, None, "s"],
            "nothing": {},
        },
    }


@pytest.fixture(params=["format-1", "format-2"])
def folder(request, tmp_path):
    shutil.copytree(GOLDEN / request.param, tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("step", [7, 14])
def test_it_is_read(folder, step):
    assert equal(md.load(folder, step), golden_state(step))


def test_a_job_goes_on_from_it(folder):
    with CheckpointStore(Solo(), folder, keep=2) as store:
        like = golden_state(7)
        for array in (like["parameters"]["w"], like["optimizer"]["m"]):
            array[...] = 0
        step, state = store.restore(like)
        assert (step, equal(state, golden_state(14))) == (14, True)
        store.verify(7)
        store.save(15, state)
        assert store.all_steps() == [14, 15]
    assert equal(md.load(folder), golden_state(14))


def test_damage_is_found(folder, capfd):
    shard = folder / "step-000000000014" / "shard-00001.h5"
    data = bytearray(shard.read_bytes())
    data[7500] ^= 4
    shard.write_bytes(data)
    assert equal(md.load(folder), golden_state(7))
    assert "step-000000000014: shard-00001.h5, bytes" in capfd.readouterr().err
