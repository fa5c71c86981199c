"""Check that 100,000 allreduces and 2,000 saves and restores leak no resources (R41).

    mpiexec -n 2 python tests/soak/soak.py [ALLREDUCES [CYCLES]]

Each rank counts communicators, requests, file handles, threads, shared segments, Python objects and
memory during the run. A line through the second half of the counts must be flat; otherwise the exit
code is 1.
"""

import shutil
import sys
import tempfile
import time

import numpy as np
from mpi4py import MPI
from resources import grown, look

import mpidist as md
from mpidist.collectives.schedules.algorithms import ALLREDUCE

NAMES = ["native", "auto", "node", "hierarchical", *ALLREDUCE]
LENGTHS = [0, 1, 7, 300, 5000]
BATCH = 50
LOOKS = 60


def allreduces(comm, count: int) -> list[dict]:
    """Do `count` allreduces of every kind, each result checked. Collective over `comm`."""
    kinds = [every_algorithm, bound_plans, started, arenas, parts]
    rng = np.random.default_rng(41)  # the same choices on every rank
    batches, looks = -(-count // BATCH), []
    for n in range(batches):
        if n % max(1, batches // LOOKS) == 0:
            looks.append(look(comm))
        kinds[n % len(kinds)](comm, rng)
    return [*looks, look(comm)]


def expect(comm, x) -> None:
    """Raise unless `x` is the sum of rank + 1 over all ranks, everywhere."""
    if not (x == comm.size * (comm.size + 1) / 2).all():
        raise AssertionError(f"rank {comm.rank}: {x[:5]}")


def every_algorithm(comm, rng, batch: int = BATCH) -> None:
    """One call after the other, in any algorithm and length; more lengths than plans are kept."""
    for _ in range(batch):
        x = np.full(rng.choice([*LENGTHS, rng.integers(3000)]), comm.rank + 1.0)
        md.allreduce(comm, x, algorithm=NAMES[rng.integers(len(NAMES))])
        expect(comm, x)


def bound_plans(comm, rng) -> None:
    """Plans bound to new arrays of a few lengths, for a bound plan lives as its communicator."""
    for _ in range(BATCH // 10):
        x = np.empty(rng.choice([3, 40, 2000]))
        call = md.plan(comm, x, algorithm=rng.choice(["native", "ring", "butterfly"]))
        for _ in range(10):
            x[:] = comm.rank + 1
            expect(comm, call())


def started(comm, rng) -> None:
    """Five at a time in the background, waited for in any order."""
    for _ in range(BATCH // 5):
        arrays = [np.full(rng.choice(LENGTHS), comm.rank + 1.0) for _ in range(5)]
        names = rng.choice(list(ALLREDUCE), 5)
        handles = [
            md.iallreduce(comm, x, algorithm=name) for x, name in zip(arrays, names, strict=True)
        ]
        for i in rng.permutation(5):
            handles[i].wait()
            expect(comm, arrays[i])


def arenas(comm, rng) -> None:
    """Arenas made and closed, summed a few times."""
    for _ in range(BATCH // 10):
        with md.Arena(comm, {"w": (int(rng.integers(1, 50)), "f4"), "b": (300, "f8")}) as arena:
            for _ in range(10):
                for name in arena:
                    arena[name][...] = comm.rank + 1
                md.allreduce(comm, arena)
                expect(comm, arena["w"])
                expect(comm, arena["b"])


def parts(comm, rng) -> None:
    """Communicators split and copied, used, and freed with all that was made for them."""
    for part in (comm.Split(int(rng.integers(2)), comm.rank), comm.Dup()):
        every_algorithm(part, rng, BATCH // 2)
        md.free(part)
        part.Free()


def checkpoints(comm, cycles: int, folder) -> list[dict]:
    """Save and restore `cycles` times, at once and in the background. Collective over `comm`."""
    looks, step = [], 0
    while step < cycles:
        with md.CheckpointStore(comm, folder, keep=2) as store:
            if step:
                store.restore(state(comm, 0))
            for _ in range(min(20, cycles - step)):
                if step % max(1, cycles // LOOKS) == 0:
                    looks.append(look(comm))
                step += 1
                (store.save_async if step % 2 else store.save)(step, state(comm, step))
                found, restored = store.restore(state(comm, 0) if step % 3 else None)
                check(comm, found, restored, step)
    return [*looks, look(comm)]


def state(comm, step: int) -> dict:
    """Replicated arrays, a box and a flat range of each rank, extras."""
    mine = np.full((3, 40), step + comm.rank, "f4")
    flat = np.full(50, step - comm.rank, "f8")
    return {
        "parameters": {"w": np.full(2000, float(step)), "b": np.full(3, step)},
        "box": md.Shard(mine, (3 * comm.size, 40), (3 * comm.rank, 0)),
        "flat": md.Shard(flat, (10, 5 * comm.size), 50 * comm.rank),
        "step": step,
    }


def check(comm, found: int, restored: dict, step: int) -> None:
    """Raise unless what was restored is what was saved."""
    box = restored["box"]
    mine = box.array if isinstance(box, md.Shard) else box[3 * comm.rank : 3 * comm.rank + 3]
    good = found == step == restored["step"] and (restored["parameters"]["w"] == step).all()
    if not (good and (mine == step + comm.rank).all()):
        raise AssertionError(f"rank {comm.rank}: step {step} was restored as {found}")


def report(comm, what: str, seconds: float, found: dict) -> bool:
    """Say on rank 0 what grew; True where something did."""
    bad = {name for name, (_, grew, allowed) in found.items() if grew >= allowed}
    if comm.rank == 0:
        print(
            f"{what} on {comm.size} ranks in {seconds:.0f} s; at the end, and the second half added"
        )
        for name, (last, grew, _) in found.items():
            print(f"  {name:<14}{last:>13,}  {grew:+11.1f}{'   GREW' if name in bad else ''}")
        sys.stdout.flush()
    return bool(bad)


def main(count: int = 100_000, cycles: int = 2_000) -> int:
    """Run both, report, and return the exit code. Collective over the job."""
    comm = MPI.COMM_WORLD
    start = time.perf_counter()
    looks = allreduces(comm, count)
    what = f"{count:,} allreduces"
    bad = report(comm, what, time.perf_counter() - start, grown(comm, looks))
    folder = comm.bcast(tempfile.mkdtemp(prefix="mpidist-soak-") if comm.rank == 0 else None)
    try:
        start = time.perf_counter()
        looks = checkpoints(comm, cycles, folder)
        what = f"{cycles:,} saves and restores"
        bad |= report(comm, what, time.perf_counter() - start, grown(comm, looks))
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
