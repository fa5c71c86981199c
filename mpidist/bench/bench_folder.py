"""The files that a bench makes: a folder that all ranks see, and reads that come from the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def bench_folder(comm, parent: str) -> Iterator[Path]:
    """Make a folder in `parent`, and remove it at the end. Collective over `comm`."""
    name = tempfile.mkdtemp(prefix="mpidist-bench-", dir=parent) if comm.rank == 0 else ""
    made = Path(comm.bcast(name))
    try:
        yield made
    finally:
        # No barrier: after an error the others may be anywhere. All that was timed ended in one.
        if comm.rank == 0:
            shutil.rmtree(made, ignore_errors=True)


def forget_pages(comm, folder: Path) -> None:
    """Tell the system that nobody needs the pages of the files in there. Collective over `comm`.

    A read then comes from the disk.
    """
    comm.Barrier()
    if comm.rank == 0 and hasattr(os, "posix_fadvise"):
        for path in folder.rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
