"""Time `group.repartition`: the shares of two servers change from 2/3 : 1/3 to 1/2 : 1/2 and back.

    mpirun -n 3 python -m benchmarks.repartition [--mib 64] [--rounds 9]

One worker and two servers on one node, float32 and Adam, so a model of 64 MiB is 192 MiB on the
servers. The same change by hand, with mpi4py, takes turns with it in a pause. Prints medians and
the first time, and whether a pull has the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md


class ByHand:
    """The same change of three arrays (parameters, two moments) between two ranks, by hand.

    The first rank has 2/3 of the elements and gives 1/6 to the other one, and gets them back.
    """

    def __init__(self, comm: MPI.Intracomm, size: int, first: bool):
        self.comm, self.first, self.sixth = comm, first, size // 6
        self.peer = comm.size - 1 if first else comm.size - 2
        self.even = False  # whether the shares are 1/2 : 1/2
        self.arrays = [np.ones(self.sixth * (4 if first else 2), "f4") for _ in range(3)]

    def __call__(self) -> None:
        """Change the shares once."""
        n, gives = self.sixth, self.first != self.even
        for k, old in enumerate(self.arrays):
            new = np.empty(old.size - n if gives else old.size + n, "f4")
            mine = slice(0, min(old.size, new.size)) if self.first else slice(-2 * n, None)
            moved = slice(-n, None) if self.first else slice(0, n)
            if gives:
                request = self.comm.Isend(np.ascontiguousarray(old[moved]), self.peer, 77)
            else:
                request = self.comm.Irecv(new[moved], self.peer, 77)
            new[mine] = old[mine]
            request.Wait()
            self.arrays[k] = new
        self.even = not self.even


def main() -> None:
    """Change shares forth and back, and print the times as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    comm, same = MPI.COMM_WORLD, True
    size = (args.mib << 18) // 6 * 6
    times: dict[str, list[float]] = {"repartition": [], "by hand": []}
    servers = [comm.size - 2, comm.size - 1]
    by_hand = ByHand(comm, size, comm.rank == servers[0]) if comm.rank in servers else None
    with md.ServerGroup(comm, servers={servers[0]: 2, servers[1]: 1}) as group:
        client = group.add("m", {"w": ((size,), "f4", "normal")}, optimizer=md.optim.adam(1e-3))

        def change(tag) -> None:
            if by_hand is not None:
                by_hand()
            comm.Barrier()

        if client is None:
            group.serve(change)
        else:
            before = client.push_pull({"w": np.full(size, 1e-3, "f4")})["w"].copy()
            for number in range(2 * args.rounds):
                start = time.perf_counter()
                group.repartition(weights=[1, 1] if number % 2 == 0 else [2, 1])
                times["repartition"].append(1000 * (time.perf_counter() - start))
                start = time.perf_counter()
                group.pause("by hand")
                change("by hand")
                times["by hand"].append(1000 * (time.perf_counter() - start))
                same = same and np.array_equal(client.pull()["w"], before)
    if comm.rank == 0:
        found: dict = {"mib": args.mib, "load": Path("/proc/loadavg").read_text().split()[0]}
        for name, each in times.items():
            found[name] = {
                "ms to 1/2": round(statistics.median(each[::2]), 1),
                "ms back": round(statistics.median(each[1::2]), 1),
                "first": round(each[0], 1),
            }
        print(json.dumps({**found, "same bits": bool(same)}))


if __name__ == "__main__":
    main()
