"""Child processes that end: output in files, a deadline, and no survivor in the background.

An MPI launcher is not one process but a tree whose leaves make their own process groups and
outlive a killed launcher. Every process started here therefore inherits a random mark in its
environment, and whoever still carries that mark when the launcher is gone is ended too. Nobody
else's process can carry it.
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

#: The environment variable that marks all descendants of one start.
MARK = "MPIDIST_TEST_MARK"

#: The exit code reported for a command that was ended at its deadline, as timeout(1) does.
TIMED_OUT = 124

#: How Open MPI, UCX and MPICH name their shared memory; other files there may hold users' data.
_MPI_SEGMENTS = ("sm_segment.", "vader_segment.", "ucx_shm_", "mpich_shm_")

#: How Open MPI's launchers name their session folder, before the number of the process.
_SESSIONS = ("ompi", "prterun", "prted", "(null)")


@dataclass(frozen=True)
class Finished:
    """What a command left: exit code, both outputs and the seconds it took."""

    args: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False

    def check(self) -> Finished:
        """Return self, or raise ``RuntimeError`` with both outputs if the command failed."""
        if self.returncode == 0:
            return self
        how = "was ended at its deadline" if self.timed_out else f"exited with {self.returncode}"
        raise RuntimeError(
            f"{' '.join(self.args)} {how} after {self.seconds:.1f} s"
            f"\n--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"
        )


#: What is started and not finished.
_alive: set[Started] = set()


class Started:
    """A running command; `finish` must be called, and may be called again.

    Parameters
    ----------
    args : sequence of str
        The command line.
    env : mapping, optional
        The whole environment; None is that of this process.
    cwd : path, optional
        Its working directory.
    sweep : bool
        Mark all descendants and end those that are left at the end. Not for ``sbatch``, whose
        jobs inherit its environment and are to outlive it.
    session : bool
        Take the number of the command for that of a launcher in `remove_session`. Not in a box: the
        launchers there have other numbers, and one of them might live that has this one.
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
        # Files and not pipes: a rank that outlives its launcher would keep a pipe open, and
        # reading to its end would wait for that rank.
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
            preexec_fn=(lambda: remove_session(os.getpid(), environment)) if session else None,
        )
        _alive.add(self)

    @property
    def pid(self) -> int:
        """The pid of the command itself."""
        return self.process.pid

    def output(self) -> str:
        """Return what it has written to stdout so far."""
        if self._finished is not None:
            return self._finished.stdout
        return self._read(0)

    def _read(self, which: int) -> str:
        file = self._files[which]
        length = os.fstat(file.fileno()).st_size
        # pread leaves the offset alone, which the child shares and appends at.
        return os.pread(file.fileno(), length, 0).decode(errors="replace")

    def finish(self, timeout: float = 60) -> Finished:
        """Wait for the end, at most `timeout` seconds, and end all that is left of it."""
        if self._finished is not None:
            return self._finished
        timed_out = False
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # Also after KeyboardInterrupt: nothing may stay behind.
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
        # A library that is killed leaves its shared memory behind, so note it while it is mapped.
        segments = mpi_segments(marked(self.mark)) if self.mark else set()
        if late := self.process.poll() is None:
            # A launcher that is asked first removes its folders and ends its own ranks. The group,
            # since the command may be a child of one that only entered a namespace for it.
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + 2
            while self._signal(0) and time.monotonic() < deadline:
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
        """Send a signal to the command's process group; False if nobody is left in it."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True


def kill_all() -> None:
    """Kill all that was started and is not finished. A signal handler may call it.

    It waits for nobody: whoever waits for a command in another thread or frame sees its end there.
    """
    for started in list(_alive):
        if started.mark:
            end_marked(started.mark, patience=0.1)
        started._signal(signal.SIGKILL)


def run(args, *, env=None, cwd=None, timeout: float = 60) -> Finished:
    """Run a command to its end or its deadline and leave no process of it behind."""
    return Started(args, env=env, cwd=cwd).finish(timeout)


def marked(mark: str, variable: str = MARK) -> list[int]:
    """Pids of the living processes that inherited `mark`, in an environment variable."""
    wanted = f"{variable}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            # A process may end, or belong to another user, while we look.
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    return pids


def signal_all(pids: Sequence[int], number: int) -> None:
    """Send a signal to several processes as if at one moment, however slow the sender is.

    They stand still until each has it: a job that ends at the first rank's signal could otherwise
    be over, or have put its handlers away, before the last rank's is sent.
    """
    for step in (signal.SIGSTOP, number, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, step)


def mpi_segments(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that the MPI library of these processes has mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == Path("/dev/shm") and path.name.startswith(_MPI_SEGMENTS):
                    found.add(path)
    return found


def forgotten_segments(age: float) -> set[Path]:
    """Files in /dev/shm that MPICH has made in the last `age` seconds and nobody has mapped.

    Ranks that are killed in MPI_Init have not removed the name yet, and are gone before anybody
    could see what they map. It looks twice: of a rank that begins the file is there first.
    """

    def look() -> set[Path]:
        found = set()
        for path in Path("/dev/shm").glob(f"{_MPI_SEGMENTS[-1]}*"):
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
    """Remove the session folder of an Open MPI launcher that is no more.

    A launcher that is killed leaves it behind, and the next one to get its number refuses to start:
    "The PMIx server's listener thread failed to start". So this belongs behind the end of a
    launcher, and between fork and exec of the next.

    Parameters
    ----------
    pid : int
        The launcher's number, or that of the process that is to become one.
    env : mapping
        Its environment.
    """
    for name in _SESSIONS:
        shutil.rmtree(Path(env.get("TMPDIR") or "/tmp", f"{name}.{pid}"), ignore_errors=True)


def end_marked(mark: str, patience: float = 5, variable: str = MARK) -> None:
    """Kill every process that inherited `mark` and wait until all are gone."""
    deadline = time.monotonic() + patience
    while (pids := marked(mark, variable)) and time.monotonic() < deadline:
        # The newest first: the kernel continues a stopped rank whose launcher is gone.
        for pid in sorted(pids, reverse=True):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
