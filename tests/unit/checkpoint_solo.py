"""A communicator of one rank without MPI, for tests of the store."""

import contextlib
import threading

import numpy as np

from mpidist.runtime import context
from mpidist.runtime.agreement import run_on_all


class Solo:
    """What the store asks of a communicator, for a job of one rank."""

    rank, size = 0, 1

    def call(self, kind):
        """Stand for the context as well."""
        return contextlib.nullcontext()

    def exchange(self, fact):
        return [fact]


def _without_mpi(of, polled, private):
    """Let ranks without MPI bring a context and a channel of their own."""
    context.of = lambda comm: comm if isinstance(comm, Solo) else of(comm)
    run_on_all.Polled = lambda comm: (
        private(comm, comm.exchange) if isinstance(comm, Solo) else polled(comm)
    )


_without_mpi(context.of, run_on_all.Polled, run_on_all.Private)


def resumed(folder, **options):
    """Open a store and go on from what it holds, as a program does that is started again."""
    from mpidist.checkpoint.store import CheckpointStore
    from mpidist.errors import NoCheckpoint

    store = CheckpointStore(Solo(), folder, **options)
    with contextlib.suppress(NoCheckpoint):
        store.restore()
    return store


def state_of(seed, rows=50):
    """A state with something of everything."""
    rng = np.random.default_rng(seed)
    return {
        "step": seed,
        "parameters": {
            "w": rng.standard_normal((rows, 7)).astype("f4"),
            "b": rng.standard_normal(rows),
        },
        "momentum": {"w": rng.standard_normal((rows, 7)).astype("f4").T},
        "mask": rng.random(11) < 0.5,
        "count": np.int64(seed + 3),
        "scalar": np.array(rng.random()),
        "schedule": [0.1, float("inf"), {"name": "cosine", "at": [seed, None, True]}],
        "empty": {},
        "nothing": np.zeros((0, 3), "f4"),
    }


def equal(one, other):
    """Whether two states are the same to the last bit."""
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(equal(one[key], other[key]) for key in one)
        )
    if isinstance(one, (np.ndarray, np.generic)):
        one, other = np.asarray(one), np.asarray(other)
        return (one.dtype, one.shape) == (other.dtype, other.shape) and (
            one.tobytes() == other.tobytes()
        )
    return repr(one) == repr(other)


def split_state(seed):
    """A state whose arrays are cut between two ranks into files of one size."""
    rng = np.random.default_rng(seed)
    return {"parameters": {"w": rng.standard_normal((8, 3))}, "step": seed}


def two_ranks(folder, numbers):
    """Write the checkpoints that two ranks would write, one after the other; returns the folder."""
    from concurrent.futures import ThreadPoolExecutor
    from queue import Queue

    from mpidist.checkpoint.store import CheckpointStore

    boxes = [[Queue(), Queue()], [Queue(), Queue()]]

    def job(rank):
        with CheckpointStore(Threaded(rank, boxes), folder) as store:
            for number in numbers:
                store.save(number, split_state(number))

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(job, rank) for rank in (0, 1)]:
            one.result(timeout=30)
    return folder


class Threaded(Solo):
    """One of two ranks that are threads of one process."""

    size = 2

    def __init__(self, rank, boxes):
        self.rank, self._boxes = rank, boxes

    def exchange(self, fact):
        other = 1 - self.rank
        self._boxes[other][self.rank].put(fact)
        facts = [fact, fact]
        facts[other] = self._boxes[self.rank][other].get(timeout=30)
        return facts


def no_more_threads(patch):
    """From now on no thread begins, as where a process may have no more of them."""

    def none_left(_):
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", none_left)
