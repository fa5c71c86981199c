"""mpidist: training of plain NumPy and CuPy models in an MPI job.

Importing this package neither initialises MPI nor imports cupy.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME = {
    "MpidistError": "errors",
    "MismatchError": "errors",
    "ReplicaError": "errors",
    "RankFailure": "errors",
    "CheckpointError": "errors",
    "StorageError": "errors",
    "NoCheckpoint": "errors",
    "ForeignCheckpoint": "errors",
    "ConfigError": "errors",
    "ProtocolError": "errors",
    "ClosedError": "errors",
    "BadRecord": "errors",
    "SourceError": "errors",
    "TooManyBadRecords": "errors",
    "Topology": "runtime.topology",
    "node_once": "runtime.topology",
    "Arena": "runtime.node_memory.arena",
    "free": "runtime.context",
    "allreduce": "collectives.allreduce",
    "iallreduce": "collectives.allreduce",
    "plan": "collectives.allreduce",
    "Handle": "collectives.allreduce",
    "Plan": "collectives.allreduce",
    "reduce_scatter": "collectives.reduce_scatter",
    "allgather": "collectives.allgather",
    "broadcast": "collectives.broadcast",
    "broadcast_parameters": "collectives.broadcast_parameters",
    "reduce": "collectives.reduce",
    "gather": "collectives.gather",
    "scatter": "collectives.scatter",
    "train": "training.train",
    "Summary": "training.train",
    "Gradients": "gradients.exchange",
    "attach": "gradients.torch_module",
    "AllReduce": "training.strategies",
    "ParameterServer": "training.exchanges.server_strategy",
    "Pipeline": "training.exchanges.pipelines.pipeline_strategy",
    "PeerAverage": "training.exchanges.peer_strategies",
    "Hogwild": "training.exchanges.peer_strategies",
    "Stage": "pipeline.stages.stage",
    "BSP": "servers.consistency",
    "ASP": "servers.consistency",
    "SSP": "servers.consistency",
    "BackupWorkers": "servers.modes.backup_workers",
    "DSSP": "servers.modes.dynamic_bound",
    "KeepStale": "servers.modes.stale_gradients",
    "DropStale": "servers.modes.stale_gradients",
    "ScaleStale": "servers.modes.stale_gradients",
    "DelayCompensated": "servers.modes.stale_gradients",
    "MomentumCorrected": "servers.modes.stale_gradients",
    "OpenRows": "servers.rows.open_rows",
    "Rebalance": "servers.balance.rebalance",
    "RowCache": "servers.rows.cache_policy",
    "ServerGroup": "servers.group",
    "Client": "servers.client",
    "CheckpointStore": "checkpoint.store",
    "TieredStore": "checkpoint.tiered",
    "Shard": "checkpoint.format.state",
    "load": "checkpoint.load",
    "wait_for_step": "checkpoint.load",
    "check_replicas": "fault_tolerance.check_replicas",
    "guard": "fault_tolerance.guard",
    "Guard": "fault_tolerance.guard",
    "watch": "fault_tolerance.watch",
    "Watch": "fault_tolerance.watch",
    "parameter_server": "servers.parameter_server",
    "Elastic": "elasticity.elastic_settings",
    "elastic": "elasticity.elastic_loop",
    "run_elastic": "elasticity.elastic_loop",
}
_SUBMODULES = ("optim", "data", "models", "pipeline")

__all__ = [*_HOME, *_SUBMODULES, "__version__"]


def imported(package: dict, name: str):
    """Import the public `name` of a package, whose dict of global names is `package`."""
    if name not in package["_HOME"]:
        raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
    home = importlib.import_module(f"{package['__name__']}.{package['_HOME'][name]}")
    package[name] = value = getattr(home, name)
    return value


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return imported(globals(), name)


def __dir__():
    return sorted(__all__)
