"""`md.train(elastic=)` with parameter servers: FOLDER, and JSON arguments; ranks die by DEATHS.

Each parameter counts how often a sample was used, with the opposite sign. DEATHS is
``rank:number:moment,...``; moment is "done" (a worker, in the callback of the step), "computed" (a
worker has the gradients of the next step), "pushed" (a worker has sent its push of the clock to
the first server only), "applied" (a server has just applied so many updates), "answered" (a server
has written so many answers), "voted" (a server has voted for the clock), "waits" (rank 0 kills it
while it waits for rank 0 in the clock), "saving", "saved", or "closing" (in the goodbye). With
copies on servers: "forwarded" (a server has forwarded so many updates), "received" (it has got so
many updates and acknowledgements), "meets", "moving", "moved" (in its n-th repair: at its
beginning, before and after it has sent its partitions), or "opened" (after so many openings of the
exchange). With other shares every few clocks: "dividing", "filling", "filled", "committing" (in its
n-th change of shares: at its beginning, before and after a server has sent its parts, and when all
ranks have their parts), or "telling" (rank 0 has told only one other rank that all have them).

Of the settings, "shares" has pairs of rank and share, and the shares change places every so many
clocks as "every" says; "stop" is [worker, step], in whose callback the worker gets a SIGTERM;
"raises" is the number of steps after which all workers raise; "rejects" is [worker, steps]: after
so many steps, the worker's model rejects the first sample that it gets in each attempt.
"""

import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.servers.client import Client
from mpidist.servers.group import ServerGroup
from mpidist.servers.link import Link
from mpidist.servers.pieces import tree_exchange
from mpidist.servers.replicas import elastic_shares
from mpidist.servers.replicas.elastic_servers import ElasticServerGroup
from mpidist.servers.replicas.shard_copies import ShardCopies
from mpidist.servers.server import Hosted, Server
from mpidist.servers.shards import ServerShard
from mpidist.servers.votes import Votes
from mpidist.servers.wire.bound_push_pull import BoundExchange
from mpidist.servers.wire.client_requests import ClientRequests
from mpidist.training.exchanges.carried import replicated_servers
from mpidist.training.exchanges.carried.replicated_servers import ReplicatedServers
from mpidist.training.exchanges.server_exchange import Served

SAMPLES, BATCH = 120, 24
folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
comm, me = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
deaths = [one.split(":") for one in os.environ["DEATHS"].split(",") if one]
done, clients, groups, calls, rejected = 0, [], [], {}, {}
pids = comm.allgather(os.getpid())


def die(moment, number):
    if [str(me), str(number), moment] in deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    if settings.get("stopped") == [me, number, moment]:
        os.kill(os.getpid(), signal.SIGSTOP)


def patch(kind, name, moment, number=None, before=False):
    """Let `kind.name` die at `moment`; `number` finds the number of the call, or counts calls."""
    usual = getattr(kind, name)

    def call(self, *args, **more):
        calls[moment] = calls.get(moment, 0) + 1
        if before:
            die(moment, number(self, *args) if number else calls[moment])
        result = usual(self, *args, **more)
        if not before:
            die(moment, number(self, *args) if number else calls[moment])
        return result

    setattr(kind, name, call)


patch(ClientRequests, "post", "pushed", lambda self, server, *_: self.clock if server == 0 else -1)
# The same of a push_pull of known arrays, whose messages go to the servers in their order.
patch(BoundExchange, "post", "pushed", lambda self, link, name, model, clock, *_: (
    clock if self.rank == min(groups[-1].server_ranks) else -1))  # fmt: skip
patch(Hosted, "apply", "applied")
patch(Server, "_next_answer", "answered")
patch(ShardCopies, "forward", "forwarded", lambda self, *_: self.sent)
patch(ShardCopies, "_take", "received")
patch(ReplicatedServers, "bring_up_to_date", "meets", before=True)
patch(ReplicatedServers, "open", "opened")
for moment in ("moving", "moved"):
    patch(replicated_servers, "move_shards", moment, before=moment == "moving")
patch(ElasticServerGroup, "_change_shares", "dividing", before=True)
patch(Hosted, "use_shards", "committing", before=True)
for moment in ("filling", "filled"):
    patch(elastic_shares, "move_shards", moment, before=moment == "filling")
patch(Votes, "released", "voted", lambda self, model, actions: max(
    (each.clock for each in actions if hasattr(each, "clock")), default=-1))  # fmt: skip
patch(ServerGroup, "close", "closing", before=True)
patch(md.CheckpointStore, "save", "saving", lambda self, step, state: step, before=True)
patch(md.CheckpointStore, "save", "saved", lambda self, step, state: step)


def tell(link, ranks, tag, data, give=tree_exchange._give):
    """On rank 0: tell one rank only, and die, if that is asked for."""
    if asking and "parts are there" in asking[-1]:
        calls["telling"] = calls.get("telling", 0) + 1
        if [str(me), str(calls["telling"]), "telling"] in deaths:
            give(link, ranks[-1:], tag, data)
            os.kill(os.getpid(), signal.SIGKILL)
    give(link, ranks, tag, data)


def ask(self, doing, *args, usual=Link.run_on_all):
    asking.append(doing)
    try:
        return usual(self, doing, *args)
    finally:
        asking.pop()


tree_exchange._give, Link.run_on_all, asking = tell, ask, []


class Turns(md.Rebalance):
    """Other shares at each look: those of the servers change places."""

    def follow(self, shares, since):
        return [shares[-1], *shares[:-1]]


def remember(kind, where):
    make = kind.__init__

    def __init__(self, *args, **more):
        make(self, *args, **more)
        where.append(self)

    kind.__init__ = __init__


remember(Client, clients)
remember(ServerGroup, groups)


class Counts:
    """A model whose gradient of a sample is 1 in the place of this sample, in two tensors."""

    def __init__(self):
        self.parameters = {name: np.zeros(SAMPLES) for name in "ab"}
        self.state = {"mean": np.zeros(1)}

    def predict(self, inputs):
        return inputs

    def loss_and_gradients(self, batch, gradients, ready=None):
        self.state["mean"] += 1
        if settings.get("raises") == done:
            raise RuntimeError(f"no memory on rank {me}")
        if settings.get("rejects") == [me, done]:
            samples = batch[0].argmax(axis=1).tolist()
            if rejected.setdefault(len(groups), samples[0]) in samples:
                raise ValueError("a sample that this worker cannot use")
        for gradient in gradients.values():
            gradient[...] = batch[0].mean(axis=0)
        slow = settings.get("slow", {}).get(str(me), 0)
        time.sleep(slow)
        for rank, step, moment in deaths:
            if (me, int(step), moment) == (0, done, "waits"):
                time.sleep(0.1)
                with suppress(ProcessLookupError):  # the step is repeated
                    os.kill(pids[int(rank)], signal.SIGKILL)
        die("computed", done)
        return 1.0


def log(report):
    global done
    done = report.step
    with (folder / f"rank-{me}").open("a") as file:
        file.write(f"{report.step}\n")
    if [me, done] == settings.get("stop"):
        os.kill(os.getpid(), signal.SIGTERM)
    die("done", report.step)


modes = {"bsp": md.BSP(), "asp": md.ASP(), "ssp": md.SSP(2), "ssp0": md.SSP(0)}
modes["dssp"] = md.DSSP(1, 2)
servers = dict(settings["shares"]) if "shares" in settings else settings.get("servers", 1)
every = settings.get("every")
strategy = md.ParameterServer(
    servers, modes[settings.get("mode", "bsp")],
    settings.get("placement", "dedicated"), replicas=settings.get("replicas", 0),
    rebalance=None if every is None else Turns(every),
)  # fmt: skip
saves = {"checkpoint": folder / "saved", "checkpoint_every": 5} if settings.get("save") else {}
if "rejects" in settings:
    saves["max_bad"] = 0.5
elastic = md.Elastic(
    deadline=settings.get("deadline", "stopped"), spares=settings.get("spares", 0),
    on_exception=settings.get("on_exception", "end"),
)  # fmt: skip
model = Counts()
summary = md.train(
    comm, model, (np.eye(SAMPLES), np.zeros(SAMPLES)), optimizer=md.optim.sgd(float(BATCH)),
    global_batch=BATCH, steps=settings["steps"], strategy=strategy, callbacks=[log],
    elastic=elastic, watch_seconds=30, **saves,
)  # fmt: skip
works = bool(groups) and groups[-1].is_worker
counts = np.stack([0.0 - np.rint(x) for x in model.parameters.values()])
gap = max((max(one.gaps, default=0) for one in clients), default=0)
mean = f"mean {model.state['mean'][0]:g}, {summary.skipped_records} skipped"
# What was replaced after a death, or by other shares, is freed: a server has a shard and a copy.
del groups[:-1], clients[:-1]
gc.collect()
shards = [one for one in gc.get_objects() if isinstance(one, ServerShard) and one.parameters]
assert len(shards) <= 1 + settings.get("replicas", 0), shards
assert sum(isinstance(one, Served) for one in gc.get_objects()) <= 1
print(
    f"rank {me}: {summary.ranks} ranks, {summary.workers} workers, {summary.deaths} dead, "
    f"{summary.steps} steps, {'used' if works else 'server'} {counts.min():.0f} to "
    f"{counts.max():.0f}, {counts.sum() / 2:.0f} in all, gap {gap}, {mean}"
)
