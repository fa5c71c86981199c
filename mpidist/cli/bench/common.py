"""What the sub-commands of ``mpidist bench`` share: speaking once, heads, naming the MPI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from ...launch import claims


def say(comm, *lines: str) -> None:
    """Print on rank 0."""
    if comm.rank == 0:
        print("\n".join(lines), flush=True)


def head(comm, title: str, columns: Sequence[str], *, width: int, last: str = "") -> None:
    """Print the lines above a table: what it shows, its columns, `last` flush left."""
    names = "".join(f"{name:>{width}}" for name in columns)
    say(comm, f"# {title}", f"#{names[1:]}" + (f"  {last}" if last else ""))


def print_rows(comm, title: str, columns, rows: Sequence[dict], *, width: int) -> None:
    """Print rows under their heads; a column is (head, key of a row, format)."""
    head(comm, title, [name for name, _, _ in columns], width=width)
    for row in rows:
        say(comm, "".join(f"{row[key]:>{width}{form}}" for _, key, form in columns))


def check_folder(folder: str) -> None:
    """Raise ConfigError where the value of ``--folder`` is no folder."""
    if not Path(folder).is_dir():
        raise ConfigError(f"--folder {folder}: no such folder; all ranks must see it")


def library() -> str:
    """Return name and version of the MPI library. To be called after MPI has begun."""
    from mpi4py import MPI

    return claims.mpi_name(MPI.Get_library_version())
