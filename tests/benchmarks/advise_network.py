"""Measure how much `bench allreduce --advise` speeds up a job on hosts with a slow network."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from onebox.network import ShapedNetwork, shaped_network

from mpidist.advice.advise import PATIENCE, Site, advise, installed_mpi
from mpidist.launch.processes import Finished

_HOSTS, _SIZES = 4, [4 << 10, 64 << 10, 1 << 20, 16 << 20]
_OPTIONS = ("--step", "16", "--rounds", "5")


class NetworkSite(Site):
    """Ranks on the hosts of a shaped network."""

    def __init__(self, net: ShapedNetwork, ranks_per_host: int):
        super().__init__([], _OPTIONS, _SIZES)
        self.net, self.ranks_per_host = net, ranks_per_host

    def run(self, words: Sequence[str], variables: Mapping[str, str]) -> Finished:
        """Run a program on all hosts to its end."""
        return self.net.mpirun(self.ranks_per_host, words, env=variables, timeout=PATIENCE)


def advice(say: Callable[[str], None]) -> list[dict]:
    """4 hosts x 1 rank, 1 Gbit/s: Open MPI with its advised rules over its default. Local."""
    with shaped_network(_HOSTS, "1gbit") as net, tempfile.TemporaryDirectory() as folder:
        rows = advise(NetworkSite(net, 1), installed_mpi(), Path(folder), say)
    return [
        {
            "case": "advise", "layout": f"{_HOSTS} x 1", "bytes": row["bytes"],
            "what": row["algorithm"], "ms": round(row["advised_us"] / 1e3, 3),
            "yardstick": "MPI's default", "yardstick_ms": round(row["default_us"] / 1e3, 3),
            "ratio": row["ratio"], "must": None, "aim": None,
        }
        for row in rows
    ]  # fmt: skip
