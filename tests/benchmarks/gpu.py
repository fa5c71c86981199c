"""Arrays of a GPU: sums, training, servers and saves, beside the same with arrays of the host.

    PYTHONPATH=tests mpirun -n 2 python -m benchmarks.gpu [--json FILE] [--only sums,training]

The candidates of a group take turns in each round; a table has the medians of the rounds' times,
each that of the slowest rank, from a barrier until the GPU has done its work, and the medians of
the rounds' ratios to the group's first candidate.

    sums        allreduce of float32 on the GPU by `md.allreduce`: through buffers of the host
                ("staged"), and with GPU memory in the hands of MPI ("direct", where
                `python -m mpidist.gpu_direct` has proved that it works); beside MPI's own on the
                host, and beside a copy by hand through memory that is not pinned
    training    one step of LeNet: gradients, their exchange, update
    servers     push_pull of 16 MiB with updates on a GPU and on processors
    saves       64 MiB of arrays: how long `save_async` and `save` keep the program
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist import arrays, models, optim
from mpidist.bench.report import size_label
from mpidist.errors import MpidistError
from mpidist.runtime.topology import topology_of

SIZES = {4 << 10: 201, 256 << 10: 101, 4 << 20: 31, 64 << 20: 9}
BATCHES = {128: 31, 1024: 7}
SERVED, SAVED = 16 << 20, 64 << 20


class Bench:
    """The rows of the table, and what all groups need."""

    def __init__(self, comm):
        self.comm, self.cupy = comm, arrays.load_cupy()
        self.local = topology_of(comm).local_rank
        self.device = arrays.to_device(np.zeros(1, "f4"), self.local).device
        self.rows: list[dict] = []

    def to_device(self, x):
        return arrays.to_device(x, self.local)

    def turns(
        self, group: str, candidates: Mapping[str, Callable[[], object]], rounds: int,
        around: Callable[[str], object] = lambda name: None, comm=None,
    ) -> None:  # fmt: skip
        """Time each candidate in each round; ``around(name)`` is called before, untimed."""
        comm, names = comm or self.comm, list(candidates)
        seconds, rng = np.empty((rounds, len(names))), np.random.default_rng(0)
        for k in range(-2, rounds):  # two rounds to warm up
            for index in rng.permutation(len(names)):
                around(names[index])
                self.device.synchronize()
                comm.Barrier()
                began = time.perf_counter()
                candidates[names[index]]()
                self.device.synchronize()
                if k >= 0:
                    seconds[k, index] = time.perf_counter() - began
        comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
        for index, name in enumerate(names):
            ratio = float(np.median(seconds[:, index] / seconds[:, 0]))
            middle, least = float(np.median(seconds[:, index])), float(seconds[:, index].min())
            row = {"group": group, "name": name, "ms": middle * 1e3, "least_ms": least * 1e3}
            self.rows.append(row | {"ratio": ratio, "rounds": rounds})


# ------------------------------------------------------------------------------------------ groups


def sums(bench: Bench) -> None:
    """Allreduce of several sizes, on the device and on the host."""
    comm, cupy = bench.comm, bench.cupy
    proved = all(comm.allgather(arrays._proved(arrays.proof_path())))
    for nbytes, rounds in SIZES.items():
        host = np.ones(nbytes // 4, "f4")
        x, summed, pageable = bench.to_device(host), np.empty_like(host), np.empty_like(host)

        def way(name: str, x=x) -> None:
            """Choose the way of the next turn, and look for the proof before its time begins."""
            arrays.set_direct(name.endswith("direct"))
            arrays.mpi_direct(x)
            x.fill(1)

        def by_hand(x=x, pageable=pageable, summed=summed) -> None:
            comm.Allreduce(x.get(out=pageable), summed)
            x.set(summed)

        def on_host(host=host, summed=summed) -> None:
            comm.Allreduce(host, summed)

        chosen = md.plan(comm, x).algorithm
        found = {f"md auto ({chosen}), staged": lambda x=x: md.allreduce(comm, x)}
        if proved:
            for name in ("native", "ring"):
                found[f"md {name}, direct"] = lambda x=x, name=name: md.allreduce(
                    comm, x, algorithm=name
                )
        found |= {"get, Allreduce, set": by_hand, "Allreduce of host arrays": on_host}
        bench.turns(f"sum of {size_label(nbytes)}", found, rounds, way)
        for name, call in found.items():
            way(name)
            call()
            if not ((summed if "host" in name else x.get()) == comm.size).all():
                raise MpidistError(f"{name}: a sum of {size_label(nbytes)} is wrong")
        del x
        cupy.get_default_memory_pool().free_all_blocks()
    arrays.set_direct(None)


def training(bench: Bench) -> None:
    """One step of LeNet with AllReduce, by `md.Gradients`."""
    comm, rng = bench.comm, np.random.default_rng(bench.comm.rank)
    for batch, rounds in BATCHES.items():
        inputs = rng.standard_normal((batch, 1, 28, 28)).astype("f4")
        labels = rng.integers(0, 10, batch)
        found, kept = {}, []
        for name, move in (("GPU", bench.to_device), ("processors", np.array)):
            model, optimizer = models.lenet(), optim.momentum(0.01)
            for key, array in model.parameters.items():
                model.parameters[key] = move(array)
            given, state = (move(inputs), move(labels)), optimizer.init(model.parameters)
            gradients = md.Gradients(comm, model.parameters)
            kept.append(gradients)

            def step(model=model, given=given, gradients=gradients, state=state, it=optimizer):
                gradients.begin(1 / comm.size)
                model.loss_and_gradients(given, gradients.views, gradients.ready)
                gradients.reduce()
                it.update(gradients.views, state, model.parameters)

            found[f"LeNet on {name}"] = step
        bench.turns(f"step of {batch} samples per rank", found, rounds)
        for gradients in kept:
            gradients.close()


def servers(bench: Bench, rounds: int = 15) -> None:
    """`push_pull` with one server, whose updates are made on its GPU or on its processors."""
    comm, n = bench.comm, SERVED // 4
    if comm.size < 2:
        return
    with md.ServerGroup(comm, servers=1) as group:
        found = {}
        for name, optimizer in (("momentum", optim.momentum(0.1)), ("adam", optim.adam(0.01))):
            for where in ("gpu", "cpu"):
                client = group.add(
                    f"{name} {where}", {"w": np.zeros(n, "f4")}, optimizer=optimizer,
                    server_device=where,
                )  # fmt: skip
                if client is not None:
                    gradient, out = {"w": np.ones(n, "f4")}, {"w": np.zeros(n, "f4")}
                    found[f"{name}, server_device={where!r}"] = (
                        lambda client=client, g=gradient, out=out: client.push_pull(g, out=out)
                    )
        if group.is_worker:
            for name in ("momentum", "adam"):
                mine = {label: call for label, call in found.items() if label.startswith(name)}
                label = f"push_pull of {size_label(SERVED)}, {name}"
                bench.turns(label, mine, rounds, comm=group.workers)


def saves(bench: Bench, rounds: int = 7) -> None:
    """How long a save keeps the program: in the background, and until the data are safe."""
    comm, parts = bench.comm, 16
    folder = tempfile.mkdtemp(prefix="mpidist-gpu-") if comm.rank == 0 else None
    folder = Path(comm.bcast(folder))
    host = {f"p{k}": np.full(SAVED // 4 // parts, k, "f4") for k in range(parts)}
    states = {"GPU": {k: bench.to_device(x) for k, x in host.items()}, "host": host}
    steps = iter(range(1, 1 << 30))
    with ExitStack() as stack:
        stores = {
            name: stack.enter_context(md.CheckpointStore(comm, folder / name, keep=1))
            for name in states
        }

        def wait(_: str) -> None:
            for store in stores.values():
                store.wait()

        for method in ("save_async", "save"):
            found = {
                f"{method} of arrays on the {name}": (
                    lambda name=name, method=method: getattr(stores[name], method)(
                        next(steps), states[name]
                    )
                )
                for name in states
            }
            bench.turns(f"{method} of {size_label(SAVED)}", found, rounds, wait)
        wait("")
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


GROUPS = {"sums": sums, "training": training, "servers": servers, "saves": saves}


# ------------------------------------------------------------------------------------------ report


def facts(bench: Bench) -> dict:
    """Return what the figures depend on."""
    cupy = bench.cupy
    name = cupy.cuda.runtime.getDeviceProperties(bench.device.id)["name"]
    return {
        "device": name.decode() if isinstance(name, bytes) else str(name),
        "devices": cupy.cuda.runtime.getDeviceCount(), "ranks": bench.comm.size,
        "driver": cupy.cuda.runtime.driverGetVersion(), "cupy": cupy.__version__,
        "numpy": np.__version__, "python": platform.python_version(),
        "mpi": MPI.Get_library_version().strip("\0 \n").splitlines()[0],
        "mpi_says_gpu": arrays._mpi_says(), "proved": arrays._proved(arrays.proof_path()),
        "way_of_this_job": "direct" if arrays.mpi_direct(cupy.zeros(1)) else "staged",
    }  # fmt: skip


def show(found: dict, rows: list[dict]) -> None:
    """Print the facts and one table."""
    print("  ".join(f"{key}: {value}" for key, value in found.items()))
    print(f"{'':<58}{'median ms':>11}{'least':>11}{'ratio':>8}")
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            print(f"{group} ({row['rounds']} rounds)")
        print(f"  {row['name']:<56}{row['ms']:>11.3f}{row['least_ms']:>11.3f}{row['ratio']:>8.2f}")
    sys.stdout.flush()


def main() -> int:
    """Run the groups, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write facts and rows to this file")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    try:
        bench = Bench(comm)
    except MpidistError as error:
        if comm.rank == 0:
            print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    md.allreduce(comm, np.zeros(1))  # reads the environment, which may ask for the direct way
    found, began = facts(bench), time.perf_counter()
    for name in args.only.split(","):
        GROUPS[name](bench)
        if comm.rank == 0:
            print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    everyone = comm.gather(bench.rows)
    if comm.rank == 0:
        assert everyone is not None
        known = [(row["group"], row["name"]) for row in bench.rows]
        # Rank 0 may be the server, which has no times of its own.
        others = [row for rows in everyone[1:] for row in rows]
        rows = bench.rows + [row for row in others if (row["group"], row["name"]) not in known]
        show(found, rows)
        if args.json:
            text = json.dumps({**found, "rows": rows}, indent=1)
            args.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
