"""A box of Linux namespaces, with its own processes, mounts, shared memory and, if asked, network.

A one-box cluster makes all its processes, mounts and devices in such a box. When the first process
of a PID namespace ends, the kernel kills all other processes of the namespace. Mounts, network
devices and /dev/shm exist until the last process that sees them ends. So the end of the first
process cleans up everything. The first process reads its stdin from the test process, and ends when
this pipe is closed, also when the test process is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpidist.errors import ConfigError
from mpidist.launch.processes import Finished, Started

#: The shell reaps orphans while it waits for cat, which a bare cat as first process would not.
#: It kills before it removes, since a daemon would go on writing into the folder.
_FIRST = """mount -t tmpfs tmpfs /dev/shm && echo ready
cat >/dev/null
kill -9 -1
rm -rf "$0"
"""


def missing(programs: Sequence[str], packages: str) -> str | None:
    """Say in one line why a box cannot be made here, or None if it can. Local."""
    if os.geteuid() != 0:
        return f"needs root, given uid {os.geteuid()}"
    absent = [p for p in ("unshare", "nsenter", *programs) if not shutil.which(p)]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install {packages}"
    return None


class Box:
    """Private PID, mount and IPC namespaces; `close` ends all that runs in them. Local.

    Parameters
    ----------
    network : bool
        Also a private network namespace, with the loopback device up.
    """

    def __init__(self, *, network: bool = False):
        #: Short, since the path of a Unix socket ends at 107 bytes; gone with the box.
        self.folder = Path(tempfile.mkdtemp(prefix="onebox-"))
        # Launchers name their session folders by process numbers, which begin again in every box.
        (self.folder / "tmp").mkdir()
        kinds = ["--pid", "--mount", "--ipc", *(["--net"] if network else [])]
        unshare = ["unshare", *kinds, "--fork", "--kill-child", "--mount-proc"]
        self._unshare = subprocess.Popen(
            [*unshare, "sh", "-c", _FIRST, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if self._unshare.stdout.readline() != b"ready\n":  # type: ignore[union-attr]
            said = self._unshare.communicate()[1].decode(errors="replace").strip()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ConfigError(f"this machine gives no namespaces: {said}")
        pid = self._unshare.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self._first = int(children[0])
        self._started: list[Started] = []
        self._nsenter = ["nsenter", f"--target={self._first}", *kinds]
        if network:
            self.run(["ip", "link", "set", "lo", "up"]).check()

    def start(
        self,
        args: Sequence[str | os.PathLike],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        sweep: bool = True,
    ) -> Started:
        """Start a command in the box, as `Started` does. Local."""
        # Entering the mount namespace moves to its root unless told where to stay.
        where = Path(cwd) if cwd else Path.cwd()
        command = [*self._nsenter, f"--wd={where.resolve()}", "--", *args]
        environment = {**(os.environ if env is None else env), "TMPDIR": str(self.folder / "tmp")}
        started = Started(command, env=environment, sweep=sweep, session=False)
        self._started = [one for one in self._started if one.process.poll() is None] + [started]
        return started

    def run(self, args: Sequence[str | os.PathLike], *, timeout: float = 60, **options) -> Finished:
        """Run a command in the box to its end. Local."""
        return self.start(args, **options).finish(timeout)

    def close(self) -> None:
        """End all processes of the box and free what it holds. Local."""
        # nsenter stops itself when its command is stopped, and then never reads its exit code.
        for started in self._started:
            if started.process.poll() is None:
                started.process.send_signal(signal.SIGCONT)
        for stream in (self._unshare.stdin, self._unshare.stdout, self._unshare.stderr):
            stream.close()  # type: ignore[union-attr]
        # The end of its input ends the first process; unshare then has seen the namespace empty.
        try:
            self._unshare.wait(10)
        except subprocess.TimeoutExpired:
            self._unshare.kill()
            self._unshare.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
