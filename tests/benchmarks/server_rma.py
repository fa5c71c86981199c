"""Pulls by `MPI_Get` beside two-sided messages: on one host, and on a shaped network of 4 hosts.

    mpirun -n 2 python -m benchmarks.server_rma node
    python -m benchmarks.server_rma net                  needs root, calls mpirun

The last rank has a model in an MPI window; all others pull it, at the same time. A pull by
`MPI_Get` reads the number of updates, the model, and the number again; if the numbers differ, the
model may be torn, and is read again. A pull in messages is a request and an answer. The server
updates the model every `--every` pulls of the first worker (as ASP would), and polls for requests
otherwise; with `--busy`, it also computes for so many milliseconds without a call of MPI, in which
only memory that the hosts' processors share, or a network card, can answer a Get. Times are those
of the slowest worker; the three kinds take turns, and the medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

_ASK, _ANSWER, _STOP = 1, 2, 3


class OneSided:
    """The model and its number of updates in a window of the server."""

    def __init__(self, comm, server: int, n: int):
        from mpi4py import MPI

        mine = comm.rank == server
        self.server, self.torn = server, 0
        self.window = MPI.Win.Allocate((4 * n + 64) * mine, 1, MPI.INFO_NULL, comm)
        if mine:
            memory = np.frombuffer(self.window.tomemory(), np.uint8)
            memory[:] = 0
            self.number, self.model = memory[:8].view(np.int64), memory[64:].view(np.float32)
        comm.Barrier()
        self.window.Lock_all(MPI.MODE_NOCHECK)
        self._before, self._after = np.zeros(1, np.int64), np.zeros(1, np.int64)

    def pull(self, out: np.ndarray) -> None:
        """Read the model; again if it was updated meanwhile (an odd number: is being updated)."""
        from mpi4py import MPI

        window, server = self.window, self.server
        while True:
            window.Get([self._before, MPI.BYTE], server, (0, 8, MPI.BYTE))
            window.Flush(server)
            window.Get([out, MPI.BYTE], server, (64, out.nbytes, MPI.BYTE))
            window.Flush(server)
            window.Get([self._after, MPI.BYTE], server, (0, 8, MPI.BYTE))
            window.Flush(server)
            if self._before[0] == self._after[0] and self._before[0] % 2 == 0:
                return
            self.torn += 1

    def update(self) -> None:
        """Add 1 to the model. Only the server calls it."""
        self.number += 1
        self.window.Sync()
        self.model += 1
        self.window.Sync()
        self.number += 1
        self.window.Sync()

    def free(self) -> None:
        """Free the window. Collective."""
        self.window.Unlock_all()
        self.window.Free()


def serve(comm, held: OneSided, workers: int, busy: float) -> None:
    """Answer requests until all workers have sent `_STOP`."""
    from mpi4py import MPI

    status, note, left = MPI.Status(), np.zeros(1, np.int64), workers
    sends: list = []
    while left:
        if busy:
            end = time.perf_counter() + busy
            while time.perf_counter() < end:
                pass
        if not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            os.sched_yield()
            continue
        comm.Recv(note, status.source, status.tag)
        if note[0]:
            MPI.Request.Waitall(sends)
            sends.clear()
            held.update()
        if status.tag == _ASK:
            sends.append(comm.Isend(held.model, status.source, _ANSWER))
        left -= status.tag == _STOP
    MPI.Request.Waitall(sends)


def measure(comm, n: int, rounds: int, every: int, busy: float) -> dict | None:
    """Return the median times of both kinds, in us, and the torn reads, on rank 0. Collective."""
    server = comm.size - 1
    held = OneSided(comm, server, n)
    workers = comm.Split(0 if comm.rank < server else 1)
    times: dict[str, list[float]] = {"get": [], "messages": []}
    if comm.rank == server:
        serve(comm, held, server, busy)
    else:
        out, note = np.zeros(n, np.float32), np.zeros(1, np.int64)

        def messages(update: int) -> None:
            note[0] = update
            answer = comm.Irecv(out, server, _ANSWER)
            comm.Send(note, server, _ASK)
            answer.Wait()

        for k in range(-2, rounds):
            for kind in times:
                update = int(comm.rank == 0 and k % every == 0)
                workers.Barrier()
                start = time.perf_counter()
                if kind == "messages":
                    messages(update)
                else:
                    if update:  # the server hears of it as it hears of a push
                        comm.Send(np.ones(1, np.int64), server, _ASK + 3)
                    held.pull(out)
                took = workers.allreduce(time.perf_counter() - start, op=_max())
                if k >= 0:
                    times[kind].append(took)
                assert out.min() == out.max(), "a torn read"
        comm.Send(np.zeros(1, np.int64), server, _STOP)
    torn = comm.reduce(held.torn, root=0)
    held.free()
    workers.Free()
    if comm.rank:
        return None
    get, two = (1e6 * statistics.median(times[kind]) for kind in ("get", "messages"))
    return {"bytes": 4 * n, "get_us": get, "messages_us": two, "torn": torn}


def _max():
    from mpi4py import MPI

    return MPI.MAX


def job(args) -> None:
    """Measure all sizes, on any ranks; print them, or write them to `--json`."""
    from mpi4py import MPI

    comm, rows = MPI.COMM_WORLD, []
    for busy in args.busy:
        for nbytes in args.sizes:
            row = measure(comm, nbytes // 4, args.rounds, args.every, busy / 1e3)
            if row is not None:
                rows.append({"workers": comm.size - 1, "busy_ms": busy, **row})
    if comm.rank == 0:
        if args.json:
            Path(args.json).write_text(json.dumps(rows))
        else:
            show(rows)


def show(rows: list[dict]) -> None:
    """Print one line for each row."""
    load = Path("/proc/loadavg").read_text().split()[0]
    for row in rows:
        print(
            f"{row['workers']} workers, server busy for {row['busy_ms']:g} ms, "
            f"{row['bytes']:>9} B: get {row['get_us']:9.1f} us, messages "
            f"{row['messages_us']:9.1f} us, ratio {row['get_us'] / row['messages_us']:5.2f}, "
            f"{row['torn']} torn; load {load}",
            flush=True,
        )


def net(args) -> None:
    """Each of 4 ranks on a host of its own."""
    from onebox.network import shaped_network

    tests = str(Path(__file__).resolve().parents[1])
    with shaped_network(4, args.rate) as shaped:
        file = shaped.box.folder / "found.json"
        words = [sys.executable, "-m", "benchmarks.server_rma", "job", "--json", str(file)]
        for name in ("sizes", "busy"):
            words += [f"--{name}", ",".join(map(str, getattr(args, name)))]
        words += ["--rounds", str(args.rounds), "--every", str(args.every)]
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        shaped.mpirun(1, words, env=env, timeout=300, options=args.options).check()
        show(json.loads(file.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=("node", "net", "job"))
    parser.add_argument("--sizes", type=lambda s: [int(n) for n in s.split(",")])
    parser.add_argument("--busy", type=lambda s: [float(n) for n in s.split(",")], default=[0, 5])
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--json")
    parser.add_argument("--options", type=str.split, default=[])
    args = parser.parse_args()
    many = [1 << 10, 64 << 10, 1 << 20]
    args.sizes = args.sizes or (many if args.case == "net" else [*many, 16 << 20])
    net(args) if args.case == "net" else job(args)


if __name__ == "__main__":
    main()
