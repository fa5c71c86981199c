"""For a bad state or argument, a store raises one error on all ranks, and writes nothing."""

import numpy as np
import pytest
from test_checkpoint_store import blank, everywhere, names, state_of

from mpidist.checkpoint.format.state import Shard
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import (
    CheckpointError,
    ConfigError,
    MismatchError,
    NoCheckpoint,
)


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree(comm, folder):
    """Steps, names, shapes, kinds and extras that differ are named, with their ranks."""
    last = comm.size - 1
    mine = comm.rank == last
    with CheckpointStore(comm, folder) as store:
        a = np.zeros(3)
        cases = [
            ("save: step differs", 2 if mine else 1, {"a": a}),
            ("a is replicated <f8 of global shape (4,)", 1, {"a": np.zeros(4) if mine else a}),
            ("a is replicated <f4", 1, {"a": a.astype("f4") if mine else a}),
            ("a is sharded", 1, {"a": Shard(a, (3,), 0) if mine else a}),
            ("lr is 0.2", 1, {"lr": 0.2 if mine else 0.1}),
            ("log is", 1, {"log": "x" * 500 + ("a" if mine else "b")}),
            ("arrays on some ranks", 1, {"a": 5 if mine else a}),
        ]
        for text, step, state in cases:
            said = everywhere(comm, MismatchError, lambda: store.save(step, state))  # noqa: B023
            assert text in said, said
        assert store.all_steps() == []


@pytest.mark.ranks(2)
def test_shards_that_do_not_tile(comm, folder):
    """A hole or an overlap is refused before anything is written; equal copies are no overlap."""
    r = comm.rank
    with CheckpointStore(comm, folder) as store:
        for text, shard in [
            ("are covered", Shard(np.zeros(2), (5,), 3 * r)),
            ("overlap", Shard(np.zeros(3), (5,), 2 * r)),
            ("overlap", Shard(np.zeros((2, 2)), (2, 3), (0, r))),
        ]:
            said = everywhere(comm, CheckpointError, lambda: store.save(1, {"x": shard}))  # noqa: B023
            assert text in said, said
        store.save(1, {"x": Shard(np.arange(5.0), (5,), 0)})  # replicas of one shard
        assert (store.restore()[1]["x"] == np.arange(5.0)).all()
        assert sum(1 for _ in folder.rglob("shard-*.h5")) == 1


@pytest.mark.ranks(1, 3)
def test_bad_input(comm, folder):
    """One line on all ranks for what cannot be saved, and for steps that are none."""
    with CheckpointStore(comm, folder) as store:
        for text, state in [
            ("f: builtin_function_or_method cannot be saved", {"f": len}),
            ("keys of the state must be strings", {"a": {3: 1}}),
            ("dtype object", {"a": np.array([None])}),
            ("must be a dict", [1]),
            ("array inside a list", {"a": [1, np.zeros(2)]}),
            ("bytes cannot be saved", {"a": {"b": b"x"}}),
        ]:
            said = everywhere(comm, ConfigError, lambda: store.save(1, state))  # noqa: B023
            assert text in said, said
        for step in (-1, 10**12, 1.5, True, None, "3"):
            assert "expected an integer" in everywhere(
                comm,
                ConfigError,
                lambda: store.save(step, {}),  # noqa: B023
            )
        assert names(folder) == []
    for keep in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="keep="):
            CheckpointStore(comm, folder, keep=keep)
    for bad in (((2, 2), (0, 2)), ((2,), 1), ((4,), -1), ((3, 3), (0,))):
        with pytest.raises(ConfigError):
            Shard(np.zeros((2, 2) if isinstance(bad[1], tuple) else 2), *bad)


@pytest.mark.ranks(1, 3)
def test_another_model(comm, folder):
    """A checkpoint of another model: the error names what differs; the arrays stay."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, state_of(1))
        like = blank()
        like["parameters"]["w"] = np.full((40, 8), 3.0)
        like["parameters"]["b"] = np.full(9, 3, "f4")
        like["momentum"] = {"w": np.zeros(3)}
        like["losses"] = np.zeros(2)
        said = everywhere(comm, CheckpointError, lambda: store.restore(like))
        for text in (
            "another model",
            "parameters/w has shape (40, 9) in the checkpoint, (40, 8) here",
            "parameters/b has dtype <f8 in the checkpoint, <f4 here",
            "momentum/w is missing in the checkpoint",
            "losses is a plain value in the checkpoint",
        ):
            assert text in said, said
        assert (like["parameters"]["w"] == 3).all()
        said = everywhere(comm, CheckpointError, lambda: store.restore({"step": 0}))
        assert "parameters/w is in the checkpoint only" in said
        read_only = blank()
        read_only["parameters"]["w"].flags.writeable = False
        assert "read-only" in everywhere(comm, CheckpointError, lambda: store.restore(read_only))


@pytest.mark.ranks(1, 2)
def test_nothing_there(comm, folder):
    """NoCheckpoint (exit code 2) says what was looked for, and what is there instead."""
    with CheckpointStore(comm, folder / "none") as store:
        assert "does not exist" in everywhere(comm, NoCheckpoint, lambda: store.restore())
        assert "does not exist" in everywhere(comm, NoCheckpoint, lambda: store.verify())
    with CheckpointStore(comm, folder) as store:
        assert "holds no step-" in everywhere(comm, NoCheckpoint, lambda: store.restore())
        store.save(4, state_of(4))
        said = everywhere(comm, NoCheckpoint, lambda: store.restore(step=9))
        assert "steps there: [4]" in said
        assert NoCheckpoint.exit_code == 2
