"""`md.train(elastic=)` on a small model: FOLDER, and JSON arguments; ranks die by DEATHS.

DEATHS is ``rank:step:moment,...``; moment is "done" (in the callback of the step), "computed" (the
gradients of the next step are there), "times" (the ranks compare the times of ten steps), "saving",
"resizing", "opening" (the store is opened), "exit" (all ranks have left together) or "by rank 0";
with "stopped" and "raises" it stops itself or raises there; with "decides" it gives the run to the
next attempt. Each rank logs its steps in FOLDER.
"""

import atexit
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.fault_tolerance.stragglers import Stragglers
from mpidist.launch import heartbeat
from mpidist.launch.environment import attempt_folder

folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
comm, me = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
deaths = [one.split(":") for one in os.environ["DEATHS"].split(",") if one]
rng = np.random.default_rng(0)
data = rng.standard_normal((480, 12)).astype("f4"), rng.integers(0, 3, 480)
done, resizes, pids = 0, [], comm.allgather(os.getpid())


def die(moment, step):
    if [str(me), str(step), moment] in deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    if settings.get("stopped") == [me, step, moment]:
        os.kill(os.getpid(), signal.SIGSTOP)
    if [me, step, moment, len(resizes)] in settings.get("raises", []):
        raise RuntimeError(f"no memory on rank {me}")


def leave():
    time.sleep(0.5)  # the others are in MPI_Finalize, if they call it
    die("exit", 0)


if [str(me), "0", "exit"] in deaths:
    # This handler is registered before those of mpidist, so it runs after them.
    atexit.register(leave)


class Model:
    """A small network with running statistics, which change in each step."""

    def __init__(self):
        self.network = md.models.mlp([12, 16, 3], seed=1)
        self.parameters, self.predict = self.network.parameters, self.network.predict
        self.state = {"mean": np.zeros(12, "f8")}

    def loss_and_gradients(self, batch, gradients, ready=None):
        self.state["mean"] += 0.1 * (batch[0].mean(axis=0) - self.state["mean"])
        loss = self.network.loss_and_gradients(batch, gradients, ready)
        die("computed", done)
        return loss


class Store(md.CheckpointStore):
    def save_async(self, step, state):
        super().save_async(step, state)
        die("saving", step)


def compared(stragglers, look=Stragglers.look):
    noted.append(None)
    die("times", len(noted))
    look(stragglers)


Stragglers.look, noted = compared, []


def log(report):
    global done
    done = report.step
    with (folder / f"rank-{me}").open("a") as file:
        file.write(f"{report.step}\n")
    if settings.get("stop") == [me, report.step]:
        os.kill(os.getpid(), signal.SIGUSR1)
    if settings.get("decides") == [me, report.step]:
        heartbeat.make_decision(attempt_folder(), heartbeat.IN_MEMORY)
    die("done", report.step)
    for rank, step, moment in deaths:
        if (me, step, moment) == (0, str(report.step), "by rank 0"):
            os.kill(pids[int(rank)], signal.SIGKILL)


def opened(comm):
    die("opening", done)
    return Store(comm, folder / "saved")


def resized(old, new, run):
    resizes.append((old, new))
    die("resizing", done)
    run.exchange.optimizer = md.optim.adam(0.02)


model = Model()
extra = {"on_resize": resized} if settings.get("resize") else {}
if settings.get("save"):
    extra |= {"checkpoint": opened, "checkpoint_every": 5}
given = ("deadline", "spares", "min_ranks", "on_exception")
elastic = md.Elastic(**{key: settings[key] for key in given if key in settings})
try:
    summary = md.train(
        comm, model, data, optimizer=md.optim.adam(0.01), global_batch=48, steps=settings["steps"],
        microbatches=settings.get("microbatches"), test_data=data, callbacks=[log],
        strategy=md.AllReduce(algorithm=settings.get("algorithm", "auto")),
        elastic=settings.get("elastic", True) and elastic,
        watch_seconds=30, **extra,
    )  # fmt: skip
except Exception as error:
    if not settings.get("catch"):
        raise
    print(f"rank {me} caught {type(error).__name__}: {error}")
    sys.exit(0)
state = hashlib.sha256(model.state["mean"].tobytes()).hexdigest()[:16]
bits = f"{summary.parameters_sha256} {summary.train_loss:.9f} {summary.test_accuracy}"
print(
    f"rank {me}: {summary.ranks} ranks, {summary.deaths} dead, {summary.steps} steps, bits {bits} "
    f"state {state} resizes {resizes}"
)
