"""Measure what rows of a large table cost, beside a table of 1,000 rows or all rows.

PYTHONPATH=tests python -m benchmarks.row_tables optimizers
PYTHONPATH=tests mpirun -n 2 python -m benchmarks.row_tables servers
PYTHONPATH=tests mpirun -n 2 python -m benchmarks.row_tables keys
PYTHONPATH=tests mpirun -n 3 python -m benchmarks.row_tables cache
PYTHONPATH=tests python -m benchmarks.row_tables spread
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist import optim
from mpidist.servers.layout.dealt_rows import dealt_places
from mpidist.servers.layout.placement import RowPolicy, place_tensors
from mpidist.servers.layout.routing import owned
from mpidist.servers.rows.row_policies import SPREADS

ROWS, FEW, WIDTH, SOME = 1 << 20, 1000, 16, 256


def optimizers(times: int = 25) -> None:
    """Print the median milliseconds of one update of `SOME` rows, and of one of all rows."""
    rng = np.random.default_rng(0)
    print(f"{'ms per update':14}{'some rows':>12}{'all rows':>12}")
    for name, make in optim.OPTIMIZERS.items():
        optimizer = make(0.01)
        table = {"w": np.zeros((ROWS, WIDTH), np.float32)}
        state, medians = optimizer.init(table), []
        for whole in (False, True):
            seconds = []
            for _ in range(times):
                rows = np.unique(rng.integers(0, ROWS, SOME))
                gradient = np.ones((ROWS if whole else len(rows), WIDTH), np.float32)
                start = time.perf_counter()
                optimizer.update({"w": gradient if whole else (rows, gradient)}, state, table)
                seconds.append(time.perf_counter() - start)
            medians.append(1e3 * float(np.median(seconds)))
        print(f"{name:14}{medians[0]:12.3f}{medians[1]:12.1f}", flush=True)


def servers(times: int = 200) -> None:
    """Print the median milliseconds of a step of one worker, with one server and Adam.

    A step pushes the gradients of 256 rows and pulls 256 others, in one call or in three. Two
    tables of different sizes take turns, so that other work on the machine meets both.
    """
    comm, rng = MPI.COMM_WORLD, np.random.default_rng(0)
    cases = {"lazy": (ROWS, FEW), "dense": (ROWS,)}
    with md.ServerGroup(comm, servers=1) as group:
        clients = {
            (policy, rows): group.add(
                f"{policy} {rows}", {"w": ((rows, WIDTH), "f4")}, optimizer=optim.adam(0.01),
                consistency=md.ASP(), rows=policy,
            )
            for policy, sizes in cases.items() for rows in sizes
        }  # fmt: skip
        if group.is_server:
            return
        seconds: dict[tuple, list[float]] = {
            (*key, fused): [] for key in clients for fused in (True, False)
        }
        for step in range(times):
            for (policy, rows), client in clients.items():
                if policy == "dense" and step % 10:
                    continue
                here, after = (rng.permutation(FEW)[:SOME] * (rows // FEW) for _ in range(2))
                gradient = {"w": (here, np.ones((SOME, WIDTH), np.float32))}
                for fused in (True, False):
                    start = time.perf_counter()
                    if fused:
                        client.push_pull(gradient, what={"w": after})
                    else:
                        client.push(gradient)
                        client.clock()
                        client.pull({"w": after})
                    seconds[policy, rows, fused].append(time.perf_counter() - start)
    print(f"{'ms per step':24}{'push_pull':>12}{'push, clock, pull':>20}")
    for policy, rows in clients:
        medians = (1e3 * float(np.median(seconds[policy, rows, f][2:])) for f in (True, False))
        print(f"{f'{policy}, {rows:,} rows':24}{next(medians):12.3f}{next(medians):20.3f}")


def keys(times: int = 300) -> None:
    """Print what an open table costs: making 1 Mi rows, and steps with 256 of its keys.

    A table of so many rows, and an open one of few keys, take turns with it.
    """
    comm, rng = MPI.COMM_WORLD, np.random.default_rng(0)
    cases = {
        "open": (((None, WIDTH), "f4", "normal"), "open", rng.integers(-(1 << 63), 1 << 63, ROWS)),
        "open, few": (((None, WIDTH), "f4", "normal"), "open", rng.integers(0, 1 << 63, FEW)),
        "lazy": (((ROWS, WIDTH), "f4", "normal"), "lazy", np.arange(ROWS)),
    }
    with md.ServerGroup(comm, servers=1) as group:
        clients = {
            name: group.add(
                name, {"w": spec}, optimizer=optim.adam(0.01), consistency=md.ASP(), rows=rows
            )
            for name, (spec, rows, _) in cases.items()
        }
        if group.is_server:
            return
        for name in ("open", "open, few"):
            start, ids = time.perf_counter(), cases[name][2]
            for at in range(0, len(ids), 4096):
                some = ids[at : at + 4096]
                gradient = {"w": (some, np.ones((len(some), WIDTH), np.float32))}
                clients[name].push_pull(gradient, what={"w": some[:1]})
            print(f"{name}: {len(ids):,} keys made in {time.perf_counter() - start:.2f} s")
        seconds: dict[tuple, list[float]] = {(name, new): [] for name in cases for new in (0, 1)}
        for step in range(times):
            for name, client in clients.items():
                ids = cases[name][2]
                for new in (0, 1) if step % 10 == 0 and name == "open" else (0,):
                    here, after = (
                        ids[np.unique(rng.integers(0, len(ids), SOME))] for _ in range(2)
                    )
                    here = rng.integers(-(1 << 63), 1 << 63, SOME) if new else here
                    gradient = {"w": (here, np.ones((len(here), WIDTH), np.float32))}
                    start = time.perf_counter()
                    client.push_pull(gradient, what={"w": after})
                    seconds[name, new].append(time.perf_counter() - start)
    for (name, new), found in seconds.items():
        if found:
            text = f"{name}, {'new' if new else 'known'} keys"
            print(f"{text:24}{1e3 * float(np.median(found[2:])):12.3f} ms per push_pull")
    for one in group.report()["ranks"]:
        if one["server"] is not None:
            print(one["server"]["models"]["open"]["tables"]["w"])


def cache(times: int = 200) -> None:
    """Print what a row cache saves under SSP(4), with rows of 256 float32 and two workers.

    Workers push the gradients of some rows and pull those of the next step: 256 ids drawn by Zipf's
    law of 1.2, or the same 64 rows in each step. The same steps with and without a cache take
    turns.
    """
    comm = MPI.COMM_WORLD
    with md.ServerGroup(comm, servers=1) as group:
        clients = {
            (ids, rows): group.add(
                f"{ids} {rows}", {"w": ((ROWS // 8, 256), "f4")}, optimizer=optim.sgd(0.01),
                consistency=md.SSP(4), cache_rows=rows,
            )
            for ids in ("zipf", "same") for rows in (None, 20_000)
        }  # fmt: skip
        if group.is_server:
            return
        rng = np.random.default_rng(group.workers.rank)
        seconds: dict = {key: [] for key in clients}
        received = dict.fromkeys(clients, 0)
        same = np.arange(64) * (1 + group.workers.rank)
        rows_of = {"zipf": np.zeros(1, np.int64), "same": same}
        for _ in range(times):
            after = {"zipf": np.unique((rng.zipf(1.2, SOME) - 1) % (ROWS // 8)), "same": same}
            for (ids, rows), client in clients.items():
                here = rows_of[ids]
                gradient = {"w": (here, np.ones((len(here), 256), np.float32))}
                before, start = client.stats["bytes_received"], time.perf_counter()
                client.push_pull(gradient, what={"w": after[ids]})
                seconds[ids, rows].append(time.perf_counter() - start)
                received[ids, rows] += client.stats["bytes_received"] - before
            rows_of = after
        group.barrier()
        if group.workers.rank == 0:
            for (ids, rows), client in clients.items():
                counts = client.stats["cache"] or {"hits": 0, "misses": 1}
                share = counts["hits"] / (counts["hits"] + counts["misses"])
                mean, median = (1e3 * float(f(seconds[ids, rows])) for f in (np.mean, np.median))
                print(
                    f"{ids} rows, cache_rows={rows!s:6} ms per step: mean {mean:8.3f} median "
                    f"{median:8.3f}  bytes received {received[ids, rows] / times:10,.0f}  "
                    f"hits {share:.0%}"
                )


def spread() -> None:
    """Print the rows of the busiest of 4 servers over the mean, for ids drawn by Zipf's law."""
    rng = np.random.default_rng(0)
    counts = {name: np.zeros(4) for name in SPREADS}
    layouts = {
        name: place_tensors({"w": ((ROWS, WIDTH), "f4")}, 4, {"w": RowPolicy("lazy", name)})
        for name in SPREADS
    }
    for _ in range(200):
        ids = np.unique((rng.zipf(1.2, SOME) - 1) % ROWS)
        for name, layout in layouts.items():
            rows = dealt_places(ids, ROWS, (0, 1, 2, 3)) if name == "rows" else ids
            counts[name] += [owned(layout, pieces[0], rows).sum() for pieces in layout.pieces]
    for name, found in counts.items():
        print(f"spread {name:10} busiest over mean {found.max() / found.mean():.3f}")


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["optimizers", "servers", "keys", "cache", "spread"])
    globals()[parser.parse_args().what]()


if __name__ == "__main__":
    main()
