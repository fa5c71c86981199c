"""Compare random calls of all collectives with results of NumPy; ``make fuzz`` makes 5,000 calls.

    mpiexec -n 5 python tests/mpi/fuzz.py [calls] [seed]

Every call draws from one seed: a communicator (the world, a part of it, a duplicate, or reversed
ranks), one of 18 dtypes, a memory layout for each rank, a length, an operation and an algorithm.
Values are small integers, so that sums are exact in every order of additions.
"""

import sys
import time
from collections import Counter

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.collectives.schedules import algorithms

try:
    from ml_dtypes import bfloat16
except ImportError:  # an extra of the tests
    bfloat16 = np.float16

DTYPES = [
    np.dtype(kind)
    for kind in (
        "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16",
        ">f4", ">i4", bfloat16,
    )
]  # fmt: skip
LENGTHS = (0, 1, 2, 3, 7, 64, 255, 1000, 5000, 70_000)
KINDS = (
    "allreduce", "iallreduce", "plan", "reduce_scatter", "allgather", "broadcast", "reduce",
    "gather", "scatter",
)  # fmt: skip
UFUNCS = {
    "sum": np.add, "mean": np.add, "average": np.add, "min": np.minimum, "max": np.maximum,
    "prod": np.multiply,
}  # fmt: skip


def contiguous(values):
    return values.copy()


def fortran(values):
    return np.asfortranarray(values) if values.ndim > 1 else values[::-1].copy()[::-1]


def strided(values):
    whole = np.zeros((*values.shape[:-1], 3 * values.shape[-1]), values.dtype)
    whole[..., ::3] = values
    return whole[..., ::3]


def misaligned(values):
    raw = np.zeros(values.nbytes + 1, np.uint8)
    x = np.ndarray(values.shape, values.dtype, raw, 1)
    x[...] = values
    return x


#: The fifth, arrays of no axis and of no element, is a matter of shapes.
LAYOUTS = (contiguous, fortran, strided, misaligned)


class Fuzz:
    """Calls drawn from a seed, alike on all ranks. Collective over `world`."""

    def __init__(self, world, seed):
        self.world, self.rng = world, np.random.default_rng((seed, world.size))
        half = world.Split(world.rank % 2, world.rank)
        self.comms = {
            "world": world, "half": half, "dup": world.Dup(), "dup of half": half.Dup(),
            "reversed": world.Split(0, -world.rank), "reversed half": half.Split(0, -half.rank),
        }  # fmt: skip
        self.wrong: list[str] = []
        self.seen: Counter = Counter()
        self.under_way: list = []

    def run(self, calls):
        for number in range(calls):
            self.call(number)
        self.finish()
        return self.world.allreduce(self.wrong)

    def finish(self):
        self.rng.shuffle(self.under_way)
        for handle, expected, what in self.under_way:
            self.check(handle.wait(), expected, what)
        self.under_way.clear()

    def close(self):
        self.finish()
        for name, comm in self.comms.items():
            md.free(comm)
            if name != "world":
                comm.Free()

    def check(self, got, expected, what):
        same = got.shape == expected.shape and got.dtype == expected.dtype
        if not (same and np.array_equal(got, expected)):
            self.wrong.append(f"rank {self.world.rank}: {what}")

    def call(self, number):
        """One call: all ranks draw the same, and of each rank's own values all know all."""
        rng = self.rng
        pick = lambda names: names[int(rng.integers(len(names)))]  # noqa: E731
        kind, where, dtype = pick(KINDS), pick(list(self.comms)), pick(DTYPES)
        comm = self.comms[where]
        # The parts of a split are at it side by side, so both have as many ranks drawn for.
        shape = self.shape(pick(LENGTHS), int(rng.integers(4)))
        layouts = [pick(LAYOUTS) for _ in range(self.world.size)]
        data = [rng.integers(0, 3, shape).astype(dtype) for _ in range(self.world.size)]
        op, wide = self.op(dtype, pick), bool(rng.integers(2))
        choice, root = float(rng.random()), int(rng.integers(self.world.size)) % comm.size
        p, r, data = comm.size, comm.rank, data[: comm.size]
        lay = layouts[r] if shape else contiguous
        what = f"#{number} {kind} on {where} of {p}, {dtype} {shape} {op} {lay.__name__}"
        self.seen.update([kind, where, str(dtype), lay.__name__ if shape else "no axis"])
        if 0 in shape:
            self.seen.update(["empty"])
        table = getattr(algorithms, "ALLREDUCE" if kind in KINDS[:3] else kind.upper())
        names = ["auto", "native", *table, *(algorithms.NODE if kind in KINDS[:3] else ())]
        name = names[int(choice * len(names))]
        getattr(self, kind)(comm, p, r, data, lay, op, name, root, wide, f"{what} {name}")

    @staticmethod
    def shape(n, axes):
        if n == 1 and axes == 0:
            return ()
        return (n,) if axes < 2 or n < 4 else (n // 2, 2) if axes == 2 else (n // 4, 2, 2)

    @staticmethod
    def op(dtype, pick):
        if dtype.kind == "b":
            return pick(["min", "max", np.logical_or, np.logical_xor])
        if dtype.kind == "c":
            return pick(["sum", "prod", "mean", MPI.SUM])
        if dtype.kind in "iu":
            return pick(["sum", "min", "max", "prod", MPI.SUM, np.bitwise_or, np.gcd])
        return pick(["sum", "min", "max", "prod", "mean", "average", MPI.SUM, MPI.MAX, np.fmax])

    @staticmethod
    def combined(data, op):
        """Reduce the ranks' arrays as NumPy does, in a type that holds all."""
        for mpi_op, name in ((MPI.SUM, "sum"), (MPI.MAX, "max")):
            if isinstance(op, MPI.Op) and op == mpi_op:
                op = name
        dtype, native = data[0].dtype, data[0].dtype.newbyteorder("=")
        small = dtype.name in ("float16", "bfloat16")
        stack = np.array([np.asarray(x, np.float32 if small else native) for x in data])
        ufunc = UFUNCS[op] if isinstance(op, str) else op
        whole = ufunc.reduce(stack, axis=0, dtype=stack.dtype)
        if isinstance(op, str) and op in ("mean", "average"):
            whole = np.divide(whole, whole.dtype.type(len(data)))
        return np.asarray(whole, dtype)

    # -- one method for each kind ------------------------------------------------------

    def allreduce(self, comm, p, r, data, lay, op, name, root, wide, what):
        x = lay(data[r])
        if wide:
            out = lay(np.zeros_like(data[r]))
            result = md.allreduce(comm, x, op, out=out, algorithm=name)
            self.check(x, data[r], f"{what}: x was changed")
        else:
            result = md.allreduce(comm, x, op, algorithm=name)
        self.check(result, self.combined(data, op), what)

    def iallreduce(self, comm, p, r, data, lay, op, name, root, wide, what):
        handle = md.iallreduce(comm, lay(data[r]), op, algorithm=name)
        self.under_way.append((handle, self.combined(data, op), what))
        if len(self.under_way) > 5:
            self.finish()

    def plan(self, comm, p, r, data, lay, op, name, root, wide, what):
        x = lay(data[r])
        with md.plan(comm, x, op, algorithm=name) as reduce:
            for _ in range(2):
                x[...] = data[r]
                self.check(reduce(), self.combined(data, op), what)

    @staticmethod
    def _cut(data):
        """Arrays with a first axis, and how many rows each rank has of one."""
        data = [x.reshape(1) if not x.ndim else x for x in data]
        rows, p = len(data[0]), len(data)
        counts = [rows // p + (k < rows % p) for k in range(p)]
        ends = np.cumsum([0, *counts])
        return data, [slice(ends[k], ends[k + 1]) for k in range(p)]

    def reduce_scatter(self, comm, p, r, data, lay, op, name, root, wide, what):
        data, parts = self._cut(data)
        block = md.reduce_scatter(comm, lay(data[r]), op, algorithm=name)
        self.check(block, self.combined(data, op)[parts[r]], what)

    def allgather(self, comm, p, r, data, lay, op, name, root, wide, what):
        data, _ = self._cut(data)
        mine = [x[: len(x) - k % 3 if wide else None] for k, x in enumerate(data)]
        whole = md.allgather(comm, lay(mine[r]), algorithm=name)
        self.check(whole, np.concatenate(mine, dtype=mine[0].dtype), what)

    def broadcast(self, comm, p, r, data, lay, op, name, root, wide, what):
        x = lay(data[r])
        self.check(md.broadcast(comm, x, root=root, algorithm=name), data[root], what)

    def reduce(self, comm, p, r, data, lay, op, name, root, wide, what):
        whole = md.reduce(comm, lay(data[r]), op, root=root, algorithm=name)
        if r == root:
            self.check(whole, self.combined(data, op), what)

    def gather(self, comm, p, r, data, lay, op, name, root, wide, what):
        data, _ = self._cut(data)
        mine = [x[: len(x) - k % 3 if wide else None] for k, x in enumerate(data)]
        whole = md.gather(comm, lay(mine[r]), root=root, algorithm=name)
        if r == root:
            self.check(whole, np.concatenate(mine, dtype=mine[0].dtype), what)

    def scatter(self, comm, p, r, data, lay, op, name, root, wide, what):
        if data[0].dtype.name == "bfloat16":  # it has no letter that scatter could announce
            data = [x.astype(np.float16) for x in data]
        data, parts = self._cut(data)
        block = md.scatter(comm, lay(data[r]) if r == root else None, root=root, algorithm=name)
        self.check(block, data[root][parts[r]], what)


def main():
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    world, start = MPI.COMM_WORLD, time.perf_counter()
    fuzz = Fuzz(world, seed)
    wrong = fuzz.run(calls)
    if world.rank == 0:
        print(*wrong[:20], sep="\n")
        print(f"{calls} calls on {world.size} ranks, seed {seed}: {len(wrong)} wrong, "
              f"{time.perf_counter() - start:.0f} s")  # fmt: skip
        print(", ".join(f"{name} {count}" for name, count in sorted(fuzz.seen.items())))
    fuzz.close()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
