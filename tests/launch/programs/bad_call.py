"""A user's program that makes the same wrong call on every rank."""

import sys

import numpy as np
from mpi4py import MPI

import mpidist as md

comm = MPI.COMM_WORLD


def integer_mean():
    md.allreduce(comm, np.arange(4), "mean")


def read_only():
    x = np.ones(4)
    x.flags.writeable = False
    md.allreduce(comm, x)


def rnig():
    md.allreduce(comm, np.ones(4), algorithm="rnig")


def closed_client():
    with md.parameter_server(comm, {"w": np.zeros(3)}, optimizer=md.optim.sgd(0.1)) as client:
        pass
    if client is not None:
        client.pull()
    comm.Barrier()  # servers are here when the workers fail


def closed_store():
    with md.CheckpointStore(comm, sys.argv[2]) as store:
        pass
    store.latest_step()


globals()[sys.argv[1]]()
