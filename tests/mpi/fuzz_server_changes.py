"""Random server groups that change while they train, against a serial model.

    mpiexec -n 4 python tests/mpi/fuzz_server_changes.py [groups] [seed]

Every group draws from one seed: its servers, a mode and what happens in each clock: another mode or
optimizer, other shares, a pause in which a model comes or goes or a checkpoint is loaded, an error
that is caught, a late worker, a worker that leaves. Its model has tables with lazy, dealt and open
rows, which may be cached, and may be clipped. Beside it are counters and a table of values.
Gradients are whole numbers, so that sums are exact.
"""

import copy
import time

import numpy as np
from fuzz_serial_model import check
from fuzz_servers import pieces_of, play

import mpidist as md

MODES = [md.BSP(), md.ASP(), md.SSP(0), md.SSP(2), md.DSSP(1, 3)]
SHAPES = {"a": (37, 5), "c": (), "d": (301,), "t": (20, 3)}
BIG = {"a": (60_000, 5), "c": (), "d": (301,), "t": (2000, 30)}
STEPS = 9


def draw(comm, seed):
    """What all ranks know of a group."""
    rng = np.random.default_rng((seed, 1))
    pick = lambda *of: of[int(rng.integers(0, len(of)))]  # noqa: E731
    d = {"seed": seed, "placement": pick("dedicated", "colocated")}
    most = comm.size - 1 if d["placement"] == "dedicated" else comm.size
    d["servers"] = int(rng.integers(1, most + 1))
    d["kind"] = kind = pick("sum", "sum", "momentum", "clip", "add", "assign")
    d["mode"] = 0 if kind in ("momentum", "assign", "clip") else int(rng.integers(0, len(MODES)))
    d["big"] = int(rng.integers(0, 8)) == 0
    d["limit"], d["window"] = pick(8, 64, 300, 5000), int(rng.integers(1, 5))
    d["room"], d["shared"] = pick(1, 4000, 64 << 20), pick(True, False)
    d["rows"], d["spread"] = pick("dense", "lazy"), pick("ranges", "rows")
    d["open"] = kind != "assign" and pick(True, False)
    d["cache"] = pick(None, 3, 100)
    d["samples"] = pick(True, False)
    d["stale"] = 0
    if kind == "sum" and d["mode"] in (1, 3, 4) and not d["open"]:
        d["stale"] = int(rng.integers(0, 4))
    d["side"] = pick(True, False)
    kinds = ["none"] * 4 + ["repartition", "rebalance", "load", "pause", "model", "barrier", "late"]
    kinds += ["error", "restore"]
    if kind != "assign":
        kinds += ["mode"] * (3 if kind in ("sum", "add") and not d["stale"] else 0)
        kinds += ["optimizer"] * (2 if kind in ("sum", "momentum") else 0)
    events = []
    for _ in range(STEPS):
        names = list(dict.fromkeys(pick(*kinds) for _ in range(pick(1, 1, 2, 3))))
        events.append([(name, int(rng.integers(0, 1 << 30))) for name in names])
    d["events"] = events
    return d


def optimizer_of(d, lr, plain=False):
    other = d["kind"] == "momentum" and not plain
    return md.optim.momentum(lr, 0.5) if other else md.optim.sgd(lr)


def weights_of(number, size):
    found = [1 + (number >> (3 * k)) % 7 for k in range(size)]
    if number % 5 == 0 and size > 1:
        found[number % size] = 0
    return found


def joined(everyone, mine):
    """The results of `shards` of all servers as one."""
    whole = dict(mine)
    whole["parameters"] = [part for one in everyone for part in one["parameters"]]
    whole["optimizer"] = {
        kind: [part for one in everyone for part in one["optimizer"].get(kind, [])]
        for kind in mine["optimizer"]
    }
    if "counts" in mine:
        whole["counts"] = [part for one in everyone for part in one["counts"]]
    return whole


class Run:
    """One rank of a group."""

    def __init__(self, comm, d):
        self.comm, self.d, self.extra = comm, d, None
        self.saved = None

    def shapes(self):
        return BIG if self.d["big"] else SHAPES

    def add(self, group):
        d, kind = self.d, self.d["kind"]
        model = {n: (s, "f8") for n, s in self.shapes().items()}
        rows = {"t": d["rows"]} if kind != "assign" else "dense"
        if d["open"]:
            model["o"] = ((None, 3), "f8")
            rows["o"] = "open"
        more = {}
        if kind in ("add", "assign"):
            more["update"] = kind
        else:
            more["optimizer"] = optimizer_of(d, 1.0)
            more["global_batch"] = 1 if d["samples"] else None
        if kind == "clip":
            more["clip_norm"] = 50.0
        if d["stale"]:
            more["stale"] = [md.DropStale(10**6), md.ScaleStale(1e30), md.DelayCompensated(1e-300)][
                d["stale"] - 1
            ]
        elif d["cache"]:
            more["cache_rows"] = md.RowCache(d["cache"], max_age=2)
        self.client = group.add(
            "m", model, consistency=MODES[d["mode"]], rows=rows, spread={"t": d["spread"]}, **more
        )
        self.side = None
        if d["side"]:
            self.side = group.add("s", {"n": ((50,), "f8")}, update="add", consistency=md.ASP())

    def together(self, group, event, number):
        """What servers and workers do in a pause."""
        if event == "model":
            if self.extra is None:
                self.extra = True
                self.extra_client = group.add(
                    "x", {"x": ((40,), "f8")}, optimizer=md.optim.sgd(1.0)
                )
            else:
                group.remove("x")
                self.extra = None
        elif event == "restore":
            mine = None
            if group.is_server:
                mine = copy.deepcopy(group.shards("m"))
            everyone = [one for one in self.comm.allgather(mine) if one is not None]
            if group.is_server:
                for _, _, array in group.shards("m")["parameters"]:
                    array[...] = 77.0
                group.load_shards("m", joined(everyone, mine))

    def on_pause(self, tag):
        event, number = tag.split()
        self.together(self.group, event, int(number))

    def happen(self, group, event, number, now):
        """An event of all workers, or of one, before a step."""
        d, comm, client = self.d, self.comm, self.client
        me, workers, gone, given = (
            group.workers.rank,
            group.workers.size,
            client.closed,
            now["given"],
        )
        if event == "repartition":
            if number % 3 == 0:
                ranks = [r for r in range(comm.size) if number >> (r + 3) & 1] or [0]
                if d["placement"] == "dedicated":
                    ranks = [r for r in ranks if r in group.server_ranks] or group.server_ranks
                change = {"servers": {r: 1 + r for r in ranks}}
            else:
                change = {"weights": weights_of(number, len(group.server_ranks))}
            try:
                group.repartition(**change)
                assert not d["open"], d
            except md.ConfigError:
                assert d["open"], d
        elif event == "rebalance":
            try:
                group.rebalance(md.Rebalance(gain=0.01, step=1.0))
            except md.ConfigError:
                assert d["open"], d
        elif event == "load":
            group.load()
        elif event in ("pause", "model", "restore"):
            group.pause(f"{event} {number}")
            self.together(group, event, number)
            if event == "model":
                now["xs"] = 0
        elif event == "barrier":
            group.barrier()
        elif event == "late" and number % workers == me:
            time.sleep(0.05)
        elif event == "mode":
            now["mode"] = number % len(MODES)
            if not gone:
                client.consistency = MODES[now["mode"]]
        elif event == "optimizer":
            now["plain"] = d["kind"] == "momentum" and number % 2 == 0
            now["lr"] = lr = [0.5, 1.0, 2.0][number % 3]
            exact = now["modes"][-1] == 0
            if not exact:
                group.pause("pause 0")
            if not gone:
                client.set_optimizer(optimizer_of(d, lr, now["plain"]))
            if not exact:
                group.pause("pause 0")
        elif event == "error" and number % workers == me and not gone:
            for bad in (
                lambda: client.push({"nope": np.ones(3)}, **given),
                lambda: client.push_pull({"d": np.full(301, np.nan)}, **given),
                lambda: client.push_pull({"d": np.ones(3)}, **given),
                lambda: client.pull({"t": np.array([1, 10**6])}),
                lambda: setattr(client, "consistency", "asp"),
                lambda: client.push_pull({"d": np.ones(301)}, what="nope", **given),
            ):
                try:
                    bad()
                except md.MpidistError:
                    pass
                else:
                    raise AssertionError("no error")

    def work(self, group):
        d, client = self.d, self.client
        me, workers = group.workers.rank, group.workers.size
        rng = np.random.default_rng((d["seed"], 2, me))
        shapes, pushes, pulls, mode, lr = self.shapes(), [], [], d["mode"], 1.0
        out = {n: np.zeros(s) for n, s in shapes.items()}
        given = {"samples": 1} if d["samples"] else {}
        if d["kind"] in ("add", "assign"):
            given = {}
        modes, rates, sides = [mode], [], 0
        now = {"mode": mode, "lr": lr, "modes": modes, "given": given, "xs": 0, "plain": False}
        for step, several in enumerate(d["events"]):
            gone = client.closed
            for event, number in several:
                self.happen(group, event, number, now)
            mode, lr = now["mode"], now["lr"]
            if self.extra:
                x = self.extra_client.push_pull({"x": np.full(40, 1.0)})["x"]
                now["xs"] += 1
                assert (x == -now["xs"]).all(), (d, "x", x, now["xs"])
            if self.side is not None:
                k = rng.integers(0, 50, 4)
                found = self.side.push_pull({"n": (k, np.ones(4))})["n"]
                sides += 4
                assert sides <= found.sum() <= 4 * workers * STEPS, (d, "side")
            rates.append((lr, now["plain"]))
            modes.append(mode)
            if gone:
                continue
            # ---- the step
            assert client.finished == step, (d, client.finished, step)
            value, kind = float(60 * int(rng.integers(1, 9))), int(rng.integers(0, 9))
            full = {n: np.full(s, value) for n, s in shapes.items()}
            rows = rng.integers(0, 20, 5)
            if d["kind"] == "assign":
                rows = np.unique(rows)
            keys = rng.integers(0, 12, 4) * 2**40
            odd = {"t": (rows, np.full((len(rows), *shapes["t"][1:]), value))}
            also = {}
            if d["open"]:
                also = {"o": (keys, np.full((4, 3), value))}
            asks = {"t": rng.integers(0, 20, 3)}
            if d["open"]:
                asks["o"] = rng.integers(0, 12, 4) * 2**40
            entry = {"whole": None, "rows": None, "keys": None, "value": value}
            if kind <= 2:
                pushed = {**full, **also}
                entry.update(whole=True, keys=keys if also else None)
                if d["open"]:
                    found = client.push_pull(
                        pushed, what={**dict.fromkeys(shapes), **asks}, **given
                    )
                else:
                    found = client.push_pull(pushed, out=[None, out, full][kind], **given)
            elif kind == 3:
                entry.update(rows=rows, keys=keys if also else None)
                found = client.push_pull({**odd, **also}, what=asks, **given)
            elif kind == 4:
                entry.update(whole=True)
                found = client.push_pull(full, what="d", **given)
            elif kind == 5:
                client.push(full, **given)
                full["d"][:] = 1e9
                entry.update(whole=True)
                client.clock()
                found = client.pull(what=asks)
            elif kind == 6:
                client.clock()
                found = client.pull(what=list(shapes))
            elif kind == 7:
                entry.update(rows=rows)
                client.push(odd, **given)
                client.clock()
                found = {}
            else:
                entry.update(rows=rows)
                found = client.push_pull(odd, what=asks, **given)
            pushes.append(entry)
            pulls.append(
                (
                    step + 1,
                    {n: np.array(x) for n, x in found.items()},
                    {
                        n: asks[n]
                        for n in asks
                        if n in found and kind not in (6,) and (d["open"] or kind > 2) and kind != 4
                    },
                )
            )
            if rng.integers(0, 30) == 0:
                client.close()
        return {"me": me, "pushes": pushes, "pulls": pulls, "modes": modes, "rates": rates}


def run(comm, seed):
    d = draw(comm, seed)
    one = Run(comm, d)
    limits = (1 << 17, d["window"], d["room"]) if d["big"] else (d["limit"], d["window"], d["room"])
    result = None
    with (
        pieces_of(*limits, d["shared"]),
        md.ServerGroup(comm, servers=d["servers"], placement=d["placement"]) as group,
    ):
        one.group = group
        workers = len(group.worker_ranks)
        one.add(group)
        if group.is_worker:
            result = one.work(group)
        else:
            group.serve(one.on_pause)
    held = group.hosted("m")
    parts = [] if held is None else held[1].shard.export()["parameters"]
    everyone = [each for each in comm.allgather(result) if each]
    parts = [part for each in comm.allgather(parts) for part in each]
    ends = {n: np.full(s, np.nan) for n, s in one.shapes().items()}
    ends["o"] = np.zeros((12, 3))
    for name, start, array in parts:
        if name == "o":
            if len(start):
                ends["o"][np.asarray(start).astype(np.int64) // 2**40] = array
        elif np.ndim(start):
            ends[name][np.asarray(start)] = array
        else:
            ends[name].reshape(-1)[start : start + array.size] = array
    check(one, everyone, ends, workers)
    return d


if __name__ == "__main__":
    play(run, 200)
