"""Make a few of the random server groups of ``make fuzz``; break pushes off."""

import numpy as np
import pytest
from fuzz_servers import MODES, pieces_of, run
from test_servers_broken import Breaks

import mpidist as md
from mpidist.errors import MpidistError


@pytest.mark.ranks(1, 2, 3, further=(5,))
def test_random_groups_against_a_serial_model(comm):
    """R19, R20, R69: all modes, pieces, votes, copies, any calls."""
    drawn = [run(comm, seed) for seed in range(100, 108 if comm.size > 2 else 104)]
    assert len({mode for _, _, _, mode, *_ in drawn}) > 2


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_a_push_that_is_broken_off(comm, mode):
    """Whichever piece fails: each server has all of the push, or nothing; no rank hangs."""
    if mode == "backup1" and comm.size == 2:
        mode = "asp"
    through, n = False, 0
    while not through:
        n += 3
        own, held, done = comm.Dup(), None, True
        try:
            with pieces_of(64, 2), md.ServerGroup(own, servers=1) as group:
                client = group.add(
                    "m", {"x": np.zeros(60)}, optimizer=md.optim.sgd(1.0),
                    consistency=MODES[mode], global_batch=1,
                )  # fmt: skip
                held = group.hosted("m")
                if client is not None:
                    client.pull()
                    usual = group.link.comm
                    if comm.rank == 0:
                        group.link.comm = Breaks(usual, n)
                    client.push_pull({"x": np.ones(60)}, samples=1)
                    group.link.comm = usual
        except (MpidistError, MemoryError):
            done = False
        through = comm.bcast(done)
        if held is not None:
            values = set(held[1].shard.parameters["x"].tolist())
            if mode != "bsp":
                assert len(values) == 1, (mode, n, values)
        md.free(own)
        own.Free()
    assert n > 3
