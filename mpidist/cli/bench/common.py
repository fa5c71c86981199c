"""Functions that the sub-commands of ``mpidist bench`` share, such as printing a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError
from ...launch import claims


def say(comm, *lines: str) -> None:
    """Print `lines` on rank 0 only."""
    if comm.rank == 0:
        print("\n".join(lines), flush=True)


def head(comm, title: str, columns: Sequence[str], *, width: int, last: str = "") -> None:
    """Print the title of a table and the names of its columns."""
    names = "".join(f"{name:>{width}}" for name in columns)
    say(comm, f"# {title}", f"#{names[1:]}" + (f"  {last}" if last else ""))


def print_rows(comm, title: str, columns, rows: list[dict], *, width: int) -> list[dict]:
    """Print a table and return `rows`; a column is a triple (name, key in a row, format)."""
    head(comm, title, [name for name, _, _ in columns], width=width)
    for row in rows:
        say(comm, "".join(f"{row[key]:>{width}{form}}" for _, key, form in columns))
    return rows


def check_folder(folder: str) -> None:
    """Raise ConfigError if `folder`, the value of ``--folder``, is not a folder."""
    if not Path(folder).is_dir():
        raise ConfigError(f"--folder {folder}: no such folder; all ranks must see it")


def library() -> str:
    """Return the name and version of the MPI library."""
    from mpi4py import MPI

    return claims.mpi_name(MPI.Get_library_version())
