"""Run commands with a time limit, write their output to files, and leave no process alive.

The ranks that an MPI launcher starts may outlive the launcher. To find them, `Started` puts a
random mark into the environment of the launcher, which all its descendants inherit. When the
launcher has ended, `Started.finish` kills all processes that have the mark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .process_table import MPICH_SEGMENT, group_is_running, mpi_segments

#: The environment variable that marks all descendants of one start.
MARK = "MPIDIST_TEST_MARK"

#: The exit code that is reported for a command that was ended at its deadline; timeout(1) reports
#: the same code.
TIMED_OUT = 124

#: The beginnings of the names of session folders of Open MPI's launchers; the process id follows.
_SESSIONS = ("ompi", "prterun", "prted", "(null)")


@dataclass(frozen=True)
class Finished:
    """The outcome of a command: its exit code, stdout, stderr, and the seconds it has run."""

    args: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False

    def check(self) -> Finished:
        """Return self, or raise ``RuntimeError`` with stdout and stderr if the command failed."""
        if self.returncode == 0:
            return self
        how = "was ended at its deadline" if self.timed_out else f"exited with {self.returncode}"
        raise RuntimeError(
            f"{' '.join(self.args)} {how} after {self.seconds:.1f} s"
            f"\n--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"
        )


#: The commands that are started and not finished.
_alive: set[Started] = set()


class Started:
    """A running command; the caller must call `finish`, and may call it again.

    Parameters
    ----------
    args : sequence of str
        The command line.
    env : mapping, optional
        The whole environment; None means the environment of this process.
    cwd : path, optional
        The working directory of the command.
    sweep : bool
        Whether to kill, when the command has ended, all its descendants that still run. `sweep`
        must be false for ``sbatch``, whose jobs continue after ``sbatch`` has ended.
    session : bool
        Whether to call `remove_session` with the pid of the command. `session` must be false in a
        private process namespace: there the pid may be equal to that of another launcher, whose
        temporary files would be removed.
    """

    def __init__(
        self,
        args: Sequence[str | os.PathLike],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        sweep: bool = True,
        session: bool = True,
    ):
        self.args = tuple(os.fspath(a) for a in args)
        self.mark = uuid.uuid4().hex if sweep else None
        environment = dict(os.environ if env is None else env)
        environment.pop(MARK, None)
        if self.mark:
            environment[MARK] = self.mark
        # The outputs go to files and not to pipes. A rank that outlives its launcher would keep a
        # pipe open, and reading the pipe to its end would wait for that rank.
        self._files = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        self._finished: Finished | None = None
        self._begin = time.monotonic()
        self._session = environment if session else None
        self.process = subprocess.Popen(
            self.args,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
            preexec_fn=self._before,
        )
        _alive.add(self)

    def _before(self) -> None:
        """In the new process, unblock all signals and remove an old launcher's session folder."""
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if self._session is not None:
            remove_session(os.getpid(), self._session)

    @property
    def pid(self) -> int:
        """The pid of the command."""
        return self.process.pid

    def output(self) -> str:
        """Return what the command has written to stdout so far."""
        return self._read(0) if self._finished is None else self._finished.stdout

    def _read(self, which: int) -> str:
        file = self._files[which]
        length = os.fstat(file.fileno()).st_size
        # pread does not move the offset of the file, at which the child appends.
        return os.pread(file.fileno(), length, 0).decode(errors="replace")

    def finish(self, timeout: float = 60) -> Finished:
        """Wait at most `timeout` seconds for the command; end all its processes that still run."""
        if self._finished is not None:
            return self._finished
        timed_out = False
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # No process may be left running, even after KeyboardInterrupt.
            self._end()
            _alive.discard(self)
        code = TIMED_OUT if timed_out else self.process.returncode
        out, err = self._read(0), self._read(1)
        for file in self._files:
            file.close()
        seconds = time.monotonic() - self._begin
        self._finished = Finished(self.args, code, out, err, seconds, timed_out)
        return self._finished

    def _end(self) -> None:
        # When a process is killed, the shared-memory files of its MPI library stay. The names of
        # the shared-memory files are known only while the files are mapped.
        segments = mpi_segments(marked(self.mark)) if self.mark else set()
        if late := self.process.poll() is None:
            # After SIGTERM a launcher removes its folders and ends its own ranks. The whole process
            # group gets the signal, because the started process may be a program that only enters a
            # namespace, and the launcher may be its child.
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + 2
            while self._signal(0) and group_is_running(self.pid) and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.02)
        if self.mark:
            end_marked(self.mark)
        if late:
            self._signal(signal.SIGKILL)
        self.process.wait()
        if self._session is not None:
            remove_session(self.pid, self._session)
        for segment in segments:
            segment.unlink(missing_ok=True)

    def _signal(self, number: int) -> bool:
        """Send a signal to the command's process group; return False if the group has ended."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True


def kill_all() -> None:
    """Kill all commands that are started and not finished. Signal handlers may call this."""
    for started in list(_alive):
        if started.mark:
            end_marked(started.mark, patience=0.1)
        started._signal(signal.SIGKILL)


def run(args, *, env=None, cwd=None, timeout: float = 60) -> Finished:
    """Run the command line `args` to its end or its deadline, and then end all its processes."""
    return Started(args, env=env, cwd=cwd).finish(timeout)


def marked(mark: str, variable: str = MARK) -> list[int]:
    """Return the pids of the living processes whose environment variable `variable` is `mark`."""
    wanted = f"{variable}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            # A process may end meanwhile, or may belong to another user.
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def signal_all(pids: Sequence[int], number: int) -> None:
    """Send a signal to several processes; none of them runs before all have got the signal."""
    # Without SIGSTOP, a job that ends with its first rank could be over before its last rank has
    # got the signal.
    for step in (signal.SIGSTOP, number, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, step)


def forgotten_segments(age: float) -> set[Path]:
    """Return the files in /dev/shm that MPICH has made recently and that no process has mapped."""

    def look() -> set[Path]:
        found = set()
        for path in Path("/dev/shm").glob(f"{MPICH_SEGMENT}*"):
            with contextlib.suppress(OSError):
                facts = path.stat()
                if facts.st_uid == os.geteuid() and time.time() - facts.st_ctime < age:
                    found.add(path)
        everyone = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return found - mpi_segments(everyone) if found else found

    if found := look():
        time.sleep(0.05)
        found &= look()
    return found


def remove_session(pid: int, env: Mapping[str, str]) -> None:
    """Remove the session folder (temporary files) of an Open MPI launcher that has ended.

    Also call this function before a process becomes a launcher: an earlier launcher that had the
    same pid may have left its folder.

    Parameters
    ----------
    pid : int
        The pid of the launcher, or of the process that becomes a launcher.
    env : mapping
        The environment of the launcher.
    """
    for name in _SESSIONS:
        shutil.rmtree(Path(env.get("TMPDIR") or "/tmp", f"{name}.{pid}"), ignore_errors=True)


def end_marked(mark: str, patience: float = 5, variable: str = MARK) -> None:
    """Kill every process whose environment variable `variable` is `mark`, and wait for them."""
    deadline = time.monotonic() + patience
    while (pids := marked(mark, variable)) and time.monotonic() < deadline:
        # The newest process is killed first, because the kernel continues a stopped rank when its
        # launcher has ended.
        for pid in sorted(pids, reverse=True):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
