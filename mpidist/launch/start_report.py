"""The first line that a run prints: hosts, ranks, devices, MPI, and the transport of messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import __version__, events
from .claims import mpi_name


def startup_line(comm, topology, environ: Mapping[str, str], *more: str) -> str:
    """Return a line with hosts, ranks per host, devices, MPI and transport.

    Collective over `comm`.
    """
    from mpi4py import MPI  # imported late, because the checks of the launcher come before MPI_Init

    library = MPI.Get_library_version()
    per_rank = comm.allgather(visible_gpus(environ))
    gpus = [per_rank[leader] for leader in topology.leaders]
    facts = [
        topology.describe(),
        describe_gpus(gpus),
        mpi_name(library),
        f"transport: {transport(environ, library, topology.single_host)}",
        *more,
    ]
    if events.VERBOSITY >= 2:
        facts.append(verbosity_hint(library))
    return f"mpidist {__version__}: {', '.join(facts)}"


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many GPUs this process may use, without initialising a GPU."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in environ:
            return sum(name.strip() not in ("", "-1") for name in environ[variable].split(","))
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))


def describe_gpus(per_host: Sequence[int]) -> str:
    """Return the numbers of GPUs in words, such as ``no GPU`` or ``0 to 4 GPUs per host``."""
    low, high = min(per_host), max(per_host)
    if high == 0:
        return "no GPU"
    noun = "GPU" if high == 1 else "GPUs"
    return f"{high if low == high else f'{low} to {high}'} {noun} per host"


def transport(environ: Mapping[str, str], library: str, single_host: bool) -> str:
    """Return how messages travel, such as "shared memory", as far as environment variables tell."""
    shared = "shared memory"
    ucx, fabric = environ.get("UCX_TLS"), environ.get("FI_PROVIDER")
    if "Open MPI" in library:
        layer, lanes = environ.get("OMPI_MCA_pml", ""), environ.get("OMPI_MCA_btl", "")
        if layer == "ob1" and lanes and not lanes.startswith("^"):
            names = [lane for lane in lanes.split(",") if lane != "self"]
            words = [shared if lane in ("sm", "vader") else lane for lane in names]
            if single_host and shared in words:
                return shared
            return " + ".join(words) or "none, only messages to itself"
        if layer == "ucx":
            return f"UCX ({ucx})" if ucx else f"{shared} (UCX)" if single_host else "UCX"
        fabric = fabric if layer == "cm" else None
    netmod = environ.get("MPIR_CVAR_CH4_NETMOD")
    if single_host:
        return shared
    if fabric and not fabric.startswith("^"):
        return f"libfabric ({fabric})"
    if ucx:
        return f"UCX ({ucx})"
    return f"{netmod}, chosen by MPIR_CVAR_CH4_NETMOD" if netmod else "chosen by MPI"


def verbosity_hint(library: str) -> str:
    """Return the setting that makes the MPI library print its own messages."""
    if "Open MPI" in library:
        return "MPI's own messages: OMPI_MCA_btl_base_verbose=30 OMPI_MCA_pml_base_verbose=10"
    return "MPI's own messages: MPIR_CVAR_DEBUG_SUMMARY=1 (libfabric: FI_LOG_LEVEL=info)"
