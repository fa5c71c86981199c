"""What the sub-commands of ``mpidist bench`` share: speaking once, and naming the MPI."""

from __future__ import annotations

from .. import launch


def say(comm, *lines: str) -> None:
    """Print on rank 0. Local."""
    if comm.rank == 0:
        print("\n".join(lines), flush=True)


def library() -> str:
    """Return name and version of the MPI library. Local, after MPI has begun."""
    from mpi4py import MPI

    return launch.mpi_name(MPI.Get_library_version())
