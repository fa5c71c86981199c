"""For benchmarks with files: make a temporary folder, and remove files from the page cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def bench_folder(comm, parent: str) -> Iterator[Path]:
    """Make a temporary folder in `parent` for a ``with`` block, and remove it at the end.

    Collective over `comm`.
    """
    name = tempfile.mkdtemp(prefix="mpidist-bench-", dir=parent) if comm.rank == 0 else ""
    made = Path(comm.bcast(name))
    try:
        yield made
    finally:
        # There is no barrier here, because after an error the other ranks may be in any call.
        # Without an error all ranks have just left a barrier.
        if comm.rank == 0:
            shutil.rmtree(made, ignore_errors=True)


def forget_pages(comm, folder: Path) -> None:
    """Remove all files in `folder` from the page cache of the system. Collective over `comm`."""
    comm.Barrier()
    if comm.rank == 0 and hasattr(os, "posix_fadvise"):
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
