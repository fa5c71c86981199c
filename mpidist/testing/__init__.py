"""Real launches, a real Slurm cluster and a network of known speed, for tests on one machine.

`launch` needs an MPI only; `slurm_cluster` and `shaped_network` need root and some Debian
packages, and say so in one line where these are missing. Nothing here imports MPI.
"""

from .launch import find_launcher, launch, launcher_command, launcher_kind, start
from .network import ShapedNetwork, shaped_network
from .process import Finished, Started
from .slurm import Job, SlurmCluster, slurm_cluster

__all__ = [
    "Finished",
    "Job",
    "ShapedNetwork",
    "SlurmCluster",
    "Started",
    "find_launcher",
    "launch",
    "launcher_command",
    "launcher_kind",
    "shaped_network",
    "slurm_cluster",
    "start",
]
