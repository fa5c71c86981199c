"""The folder in /dev/shm in which the ranks of a job keep copies of their state, and its end.

The folder has the same name on all hosts, and a random one, because everybody may write to
/dev/shm. Its name is kept in the control folder, so that all attempts of a job use the same one.
`mpidist launch` makes the folder on its own host, and the ranks make it on others. A run that ends
well removes its copies itself. At the end of the job, however that comes about, `mpidist launch`
removes the folder on all hosts. If `mpidist launch` is killed, the next one on its host does it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ..launch import heartbeat
from ..launch.launchers import launch_environment
from ..launch.processes import run
from . import commands
from .host_tests import PROBE
from .hosts import LaunchedJob

#: Where the memory of a host is a file system, and how the folders there are called.
MEMORY, _PREFIX = Path("/dev/shm"), "mpidist-copies-"
#: The file in the folder that names the process which removes it.
_OWNER = "owner"
#: The file in the control folder that has the name of the folder.
_NAME = "memory"


def make_memory_folder(control: Path) -> Path | None:
    """Make the folder of a job, and remove those of other jobs whose launcher was killed.

    Returns None if this host has no such file system.
    """
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    with suppress(OSError):
        with suppress(FileNotFoundError):
            known = (control / _NAME).read_text(encoding="utf-8")
            name = known if re.fullmatch(rf"{_PREFIX}[0-9a-f]+", known) else name
        folder = _own(MEMORY / name)  # first, or an older one of this job would count as stale
        (control / _NAME).write_text(name, encoding="utf-8")
        _remove_stale()
        return folder
    return None


def _own(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(folder)
    (folder / _OWNER).write_text(heartbeat.launcher_id(), encoding="utf-8")
    return folder


def _remove_stale() -> None:
    for folder in MEMORY.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            launcher = (folder / _OWNER).read_text(encoding="utf-8")
            mine = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
            if mine and not heartbeat.is_at_work(launcher, elsewhere=True):
                shutil.rmtree(folder, ignore_errors=True)


def remove_memory_folder(job: LaunchedJob, folder: Path | None, well: bool) -> None:
    """Remove the folder of a job on this host and, unless the job has ended well, on all others."""
    if folder is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    (job.folder / _NAME).unlink(missing_ok=True)
    own = socket.gethostname().partition(".")[0]
    others = [host for host in job.hosts or () if host.partition(".")[0] != own]
    if others and not well:
        environment = launch_environment()

        def remove(host: str) -> None:
            with suppress(OSError):
                words = commands.command(1, job.words, {host: 1}, restricted=True)
                run([*words, "rm", "-rf", str(folder)], env=environment, timeout=PROBE)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(remove, others))
