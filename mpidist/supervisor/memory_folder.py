"""Make and remove the folder in /dev/shm in which the ranks of a job keep copies of their state.

The folder has the same random name on all hosts. At the end of the job, finished or not, `mpidist
launch` removes the folder on all hosts. If `mpidist launch` was killed, the next `mpidist launch`
on the same host removes the folder. On other hosts, the user's next job removes it, if no rank has
used it for an hour.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ..launch import heartbeat
from ..launch.free_memory import COPIES, OWNER, remove_stale_copies
from . import commands
from .hosts import LaunchedJob, run_on_hosts

#: The file system that is in the memory of a host.
MEMORY = Path("/dev/shm")
#: The file in the control folder that contains the name of the folder in /dev/shm.
_NAME = "memory"


def make_memory_folder(control: Path) -> Path | None:
    """Make a job's folder in /dev/shm, or return None if this host has no /dev/shm.

    Also remove the folders of jobs whose `mpidist launch` was killed.
    """
    name = f"{COPIES}{secrets.token_hex(8)}"
    with suppress(OSError):
        with suppress(FileNotFoundError):
            known = (control / _NAME).read_text(encoding="utf-8")
            name = known if re.fullmatch(rf"{COPIES}[0-9a-f]+", known) else name
        # This launcher becomes the owner before the removal of left-over folders, because otherwise
        # an older folder of this job would be removed, too.
        folder = _own(MEMORY / name)
        (control / _NAME).write_text(name, encoding="utf-8")
        remove_stale_copies(MEMORY)
        return folder
    return None


def _own(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(folder)
    (folder / OWNER).write_text(heartbeat.launcher_id(), encoding="utf-8")
    return folder


def remove_memory_folder(
    job: LaunchedJob, folder: Path | None, well: bool, used: Collection[str] | None = None
) -> None:
    """Remove a job's folder in /dev/shm on all hosts.

    `well` says whether the job has finished without an error. If so, its ranks have already removed
    the folder on the hosts `used`, which are all hosts by default.
    """
    if folder is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    (job.folder / _NAME).unlink(missing_ok=True)
    here = "localhost", socket.gethostname().partition(".")[0]
    hosts = [host for host in job.hosts or () if host.partition(".")[0] not in here]
    if not hosts or (well and set(hosts) <= set(used or hosts)):
        return

    def remove(host: str) -> list[str]:
        return commands.host_test(host, job.words, job.slurm, ["rm", "-rf", str(folder)])

    run_on_hosts(job, hosts, remove)
