"""Checkpoints that former versions wrote are read for ever.

``golden/format-1`` was written by mpidist 0.1.0 on two ranks: steps 7 and 14, replicated arrays cut
between them, shards as boxes and as flat ranges, extras. Nothing in it is ever written again.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoint_solo import Solo, equal

import mpidist as md
from mpidist.checkpoint.store import CheckpointStore

GOLDEN = Path(__file__).parent / "golden"


def state_of_format_1(step):
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


@pytest.mark.parametrize("step", [7, 14])
def test_format_1_is_read(step):
    assert equal(md.load(GOLDEN / "format-1", step), state_of_format_1(step))


def test_a_job_goes_on_from_format_1(tmp_path):
    folder = tmp_path / "store"
    shutil.copytree(GOLDEN / "format-1", folder)
    with CheckpointStore(Solo(), folder, keep=2) as store:
        like = state_of_format_1(7)
        for array in (like["parameters"]["w"], like["optimizer"]["m"]):
            array[...] = 0
        step, state = store.restore(like)
        assert (step, equal(state, state_of_format_1(14))) == (14, True)
        store.verify(7)
        store.save(15, state)
        assert store.all_steps() == [14, 15]
    assert equal(md.load(folder), state_of_format_1(14))


def test_damage_in_format_1_is_found(tmp_path, capfd):
    folder = tmp_path / "store"
    shutil.copytree(GOLDEN / "format-1", folder)
    shard = folder / "step-000000000014" / "shard-00001.h5"
    data = bytearray(shard.read_bytes())
    data[7500] ^= 4
    shard.write_bytes(data)
    assert equal(md.load(folder), state_of_format_1(7))
    assert "step-000000000014: shard-00001.h5, bytes" in capfd.readouterr().err
