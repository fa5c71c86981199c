"""Compare `push_pull` with the wire: raw mpi4py in one node, and plain TCP on shaped networks.

    mpirun -n 2 python -m benchmarks.server_wire node [--mode asp]      1 worker and 1 server
    mpirun -n 3 python -m benchmarks.server_wire sharing --mode asp     2 workers and 1 server
    mpirun -n 2 python -m benchmarks.server_wire node --checksums       and with checksums
    mpirun -n 9 python -m benchmarks.server_wire memory                 8 workers and 1 server
    python -m benchmarks.server_wire net [--layouts 4+4,2+2,3+1auto]    needs root, calls mpirun

`node` alternates a push_pull with the same exchange by hand: one message each way, and the same
update; with `--checksums` also a push_pull with checksums, all by messages. `net` compares with a
plain TCP stream of as many bytes as each host sends in a push_pull, and with `md.allreduce` on as
many hosts as there are workers. "3+1auto" has BytePS's shares: the workers serve, too. `sharing`
alternates shared memory and messages, with one server. `memory` measures how far the memory of a
server and of a worker grows, after a small model has been trained,
so that modules and connections do not count: the peak of what is resident (RSS), in which the
server's parameters count in each process that reads them, and, between two steps, the proportional
share (PSS), in which each page counts once on the node.
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

_MIB = 1 << 20
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _load() -> str:
    return Path("/proc/loadavg").read_text().split()[0]


def _mode(args):
    import mpidist as md

    modes = {"bsp": md.BSP(), "asp": md.ASP(), "ssp": md.SSP(3), "backup": md.BackupWorkers(0)}
    return modes[args.mode]


def node(args) -> None:
    """1 worker and 1 server: push_pull over the same exchange and update by hand."""
    from mpi4py import MPI

    import mpidist as md
    from mpidist.servers.wire import node_share

    node_share.enabled = not (args.no_sharing or args.checksums)
    comm, mode = MPI.COMM_WORLD, _mode(args)
    worker = comm.rank == 0
    for nbytes in args.sizes:
        rounds = max(45, min(400, (512 * _MIB) // nbytes // 8))
        size, raw = nbytes // 4, comm.Dup()
        gradient, here = np.full(size, 1e-3, "f4"), np.zeros(size, "f4")
        sgd = md.optim.sgd(0.1)
        state = sgd.init({"w": here})
        model = {"w": np.zeros(size, "f4")}

        def by_hand(raw=raw, gradient=gradient, here=here, sgd=sgd, state=state):
            if worker:
                ask = raw.Irecv(here, 1, 1)
                raw.Isend(gradient, 1, 0).Wait()
                ask.Wait()
            else:
                raw.Irecv(gradient, 0, 0).Wait()
                sgd.update({"w": gradient}, state, {"w": here})
                raw.Isend(here, 0, 1).Wait()

        times: dict[str, list[float]] = {"raw": [], "push_pull": [], "checked": []}
        inner = max(1, min(50, (1 << 16) // nbytes))
        kinds = ["push_pull", "checked"] if args.checksums else ["push_pull"]
        for kind in 3 * kinds:
            with md.ServerGroup(comm, servers=1, checksums=kind == "checked") as group:
                client = group.add("m", model, optimizer=md.optim.sgd(0.1), consistency=mode)
                if client is None:
                    group.serve()
                else:
                    out, grads = {"w": model["w"]}, {"w": gradient}
                    client.pull(out=out)
                    for k in range(rounds // 3 + 2):
                        start = time.perf_counter()
                        for _ in range(inner):
                            client.push_pull(grads, out=out)
                        if k > 1:
                            times[kind].append((time.perf_counter() - start) / inner)
            for k in range(rounds // 3 + 2):
                start = time.perf_counter()
                for _ in range(inner):
                    by_hand()
                if k > 1:
                    times["raw"].append((time.perf_counter() - start) / inner)
        raw.Free()
        if worker:
            ours, theirs = (1e6 * statistics.median(times[name]) for name in ("push_pull", "raw"))
            best = min(times["push_pull"]) / min(times["raw"])
            if args.checksums:
                checked = 1e6 * statistics.median(times["checked"])
                fastest = min(times["checked"]) / min(times["push_pull"])
                print(
                    f"{nbytes:>10} B  checked {checked:11.1f} us  over push_pull "
                    f"{checked / ours:5.2f}  of the fastest {fastest:5.2f}"
                )
            print(
                f"{nbytes:>10} B  push_pull {ours:9.1f} us  raw {theirs:9.1f} us  "
                f"ratio {ours / theirs:5.2f}  of the fastest {best:5.2f}  load {_load()}",
                flush=True,
            )


def sharing(args) -> None:
    """All ranks but the last work: push_pull through shared memory over push_pull in messages."""
    from mpi4py import MPI

    import mpidist as md
    from mpidist.servers.wire import node_share

    comm, mode = MPI.COMM_WORLD, _mode(args)
    for nbytes in args.sizes:
        model = {"m": np.zeros(nbytes // 4, "f4")}
        grads, times = {"m": np.full(nbytes // 4, 1e-3, "f4")}, {True: [], False: []}
        for node_share.enabled in [True, False] * args.rounds:
            with md.ServerGroup(comm, servers=1) as group:
                sgd = md.optim.sgd(0.1)
                client = group.add("m", model, optimizer=sgd, consistency=mode)
                if client is None:
                    group.serve()
                    continue
                for k in range(12):
                    start = time.perf_counter()
                    client.push_pull(grads, out=model)
                    if k > 1:
                        times[node_share.enabled].append(1e3 * (time.perf_counter() - start))
        node_share.enabled = True
        every = comm.gather(times)
        if comm.rank == 0:
            shared, sent = (
                statistics.median([t for one in every for t in one[kind]]) for kind in (True, False)
            )
            print(
                f"{nbytes / _MIB:g} MiB {args.mode}, {comm.size - 1} workers: shared memory "
                f"{shared:.2f} ms, messages {sent:.2f} ms, ratio {shared / sent:.2f}; "
                f"load {_load()}",
                flush=True,
            )


def _train(comm, nbytes: int, mode, steps: int) -> tuple[int, int]:
    """Train a model of `nbytes`; return the bytes of this rank, and the largest PSS."""
    import mpidist as md

    mine = most = 0
    with md.ServerGroup(comm, servers=1) as group:
        sgd, spec = md.optim.sgd(0.1), {"w": ((nbytes // 4,), "f4")}
        client = group.add("m", spec, optimizer=sgd, consistency=mode)
        if client is not None:
            out = {"w": np.ones(nbytes // 4, "f4")}
            grads = {"w": np.full(nbytes // 4, 1e-3, "f4")}
            mine = 2 * nbytes
            client.pull(out=out)
            for _ in range(steps):
                client.push_pull(grads, out=out)
                most = max(most, _memory("smaps_rollup", "Pss:"))
            group.barrier()
        else:
            group.serve()
            most = _memory("smaps_rollup", "Pss:")
    return mine, most


def _memory(file: str, kind: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) << 10
    return 0


def memory(args) -> None:
    """All ranks but the last work: how far memory grows, over the bytes of the model."""
    from mpi4py import MPI

    from mpidist.servers.wire import node_share

    node_share.enabled = not args.no_sharing
    comm, nbytes, mode = MPI.COMM_WORLD, args.sizes[-1], _mode(args)
    _train(comm, _MIB, mode, 3)
    comm.Barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, shares = _memory("status", "VmHWM"), _memory("smaps_rollup", "Pss:")
    mine, most = _train(comm, nbytes, mode, 3)
    grown = (_memory("status", "VmHWM") - before - mine) / nbytes, (most - shares - mine) / nbytes
    every = comm.gather(grown)
    if comm.rank == 0:
        (*workers, server), kinds = every, ("RSS", "PSS")
        worker = " and ".join(
            f"{max(one[k] for one in workers):.2f} ({kind})" for k, kind in enumerate(kinds)
        )
        print(
            f"{nbytes} B {args.mode}, {comm.size - 1} workers, over the model: server "
            f"{server[0]:.2f} (RSS) and {server[1]:.2f} (PSS), worker's extra {worker}",
            flush=True,
        )


def job(args) -> None:
    """On a shaped network: seconds of push_pull and of allreduce, as JSON on rank 0."""
    from mpi4py import MPI

    import mpidist as md

    comm = MPI.COMM_WORLD
    workers, servers, shares = _parsed(args.layouts[0])
    roles: dict = {"servers": servers}
    if shares:
        roles = {"servers": "auto", "placement": [*range(workers, workers + servers)]}
    found = {}
    part = comm.Split(0 if comm.rank < workers else MPI.UNDEFINED)
    for nbytes in args.sizes:
        model = {"w": np.zeros(nbytes // 4, "f4")}
        grads = {"w": np.full(nbytes // 4, 1e-3, "f4")}
        times, reduces = [], []
        with md.ServerGroup(comm, **roles) as group:
            client = group.add("m", model, optimizer=md.optim.sgd(0.1), consistency=_mode(args))
            if client is None:
                group.serve()
            else:
                client.pull(out=model)
                for _ in range(args.rounds + 1):
                    group.barrier()
                    start = time.perf_counter()
                    client.push_pull(grads, out=model)
                    times.append(1e6 * (time.perf_counter() - start))
        if part != MPI.COMM_NULL:
            x = grads["w"].copy()
            for _ in range(args.rounds + 1):
                part.Barrier()
                start = time.perf_counter()
                md.allreduce(part, x, op="mean")
                reduces.append(1e6 * (time.perf_counter() - start))
            slowest = [
                [max(each) / 1e6 for each in zip(*part.allgather(mine), strict=True)][1:]
                for mine in (times, reduces)
            ]
            found[nbytes] = [statistics.median(each) for each in slowest]
        comm.Barrier()
    if comm.rank == 0:
        Path(args.json).write_text(json.dumps(found))


def _parsed(layout: str) -> tuple[int, int, bool]:
    """Return the workers, the servers, and whether workers serve with BytePS's shares."""
    workers, servers = map(int, layout.removesuffix("auto").split("+"))
    return workers, servers, layout.endswith("auto")


def _busiest(layout: str, nbytes: int) -> int:
    """Return how many bytes the busiest host sends in a push_pull of `nbytes`."""
    n, k, shares = _parsed(layout)
    if shares and n > k:
        return nbytes * 2 * n * (n - 1) // (n * n + k * n - 2 * k)
    return max(nbytes, nbytes * n // k)  # workers send a model, and servers `n` parts of one


def net(args) -> None:
    """Each rank on a host of its own: push_pull over plain TCP and against allreduce."""
    from onebox.network import shaped_network

    tests = str(Path(__file__).resolve().parents[1])
    for layout in args.layouts:
        workers, servers, _ = _parsed(layout)
        with shaped_network(workers + servers, args.rate) as shaped:
            file = shaped.box.folder / "found.json"
            words = [sys.executable, "-m", "benchmarks.server_wire", "job", "--layouts", layout]
            words += ["--sizes", ",".join(map(str, args.sizes)), "--json", str(file)]
            words += ["--rounds", str(args.rounds), "--mode", args.mode]
            path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
            streams = {}
            for nbytes in args.sizes:
                streams[nbytes] = shaped.stream(_busiest(layout, nbytes))
            env = {**_ONE_THREAD, "PYTHONPATH": path}
            shaped.mpirun(1, words, env=env, timeout=300, options=args.options).check()
            found = json.loads(file.read_text())
            for nbytes in args.sizes:
                tcp = (streams[nbytes] + shaped.stream(_busiest(layout, nbytes))) / 2
                ours, reduced = found[str(nbytes)]
                print(
                    f"{layout} {nbytes / _MIB:g} MiB {args.rate} {args.mode}: push_pull "
                    f"{1e3 * ours:.0f} ms, TCP {1e3 * tcp:.0f} ms, ratio {ours / tcp:.2f}; "
                    f"allreduce of {workers} {1e3 * reduced:.0f} ms, faster by "
                    f"{reduced / ours:.2f}; load {_load()}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=("node", "sharing", "memory", "job", "net"))
    parser.add_argument("--sizes", type=lambda s: [int(n) for n in s.split(",")])
    parser.add_argument("--layouts", type=lambda s: s.split(","), default=["4+4", "2+2"])
    parser.add_argument("--mode", choices=("bsp", "asp", "ssp", "backup"), default="bsp")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-sharing", action="store_true", help="node, memory: send messages")
    parser.add_argument("--checksums", action="store_true", help="node: with checksums, too")
    parser.add_argument("--json")
    parser.add_argument("--options", type=str.split, default=[])
    args = parser.parse_args()
    usual = {
        "node": [1 << 10, 64 << 10, _MIB, 16 * _MIB, 64 * _MIB],
        "memory": [64 * _MIB],
        "sharing": [16 * _MIB, 64 * _MIB],
    }
    args.sizes = args.sizes or usual.get(args.case, [8 * _MIB])
    {"node": node, "sharing": sharing, "memory": memory, "job": job, "net": net}[args.case](args)


if __name__ == "__main__":
    main()
