"""Heartbeats: each rank writes signs of life, its step and its end to a file of its own.

`mpidist launch` reads these files, one for each rank and each start of the program. The file is
mapped into memory, so its content survives a SIGKILL of the rank. A thread of the rank increments a
counter in the file. Examples:

    rank 0   beat 41  step 812  left      the rank has ended by itself
    rank 1   beat 37  step 811            the rank was killed or is stopped
    rank 2   beat 41  step 811  failed    an error of this rank has ended the job
    rank 3   beat 41  step 811  heard     a signal has asked the rank to end

The exit code of ``mpiexec`` is not enough: with fault tolerance, Open MPI's ``mpiexec`` returns 0
even after a rank was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .claims import rank_hint
from .control_groups import group_of, peak_memory
from .environment import ATTEMPT_FOLDER, attempt_folder, memory_folder
from .process_table import born, is_running

#: The environment variables that `mpidist launch` sets for its ranks: the folder of this attempt,
#: its number (from 0), and ``HOST PID BORN`` of the launching process.
FOLDER, ATTEMPT, LAUNCHER = ATTEMPT_FOLDER, "MPIDIST_ATTEMPT", "MPIDIST_LAUNCHER"
#: The file that `mpidist launch` makes in the attempt's folder when the attempt is over.
OVER = "over"
#: The file that appears in the attempt's folder as soon as the program has begun on some rank.
BEGUN = "begun"
#: The file with the text that identifies the launcher of the attempt.
LAUNCHER_FILE = "launcher"
#: Files in the folder of an attempt whose run another attempt, with more ranks, may take over
#: (`fault_tolerance.hand_over`). CAN: the attempt can hand its run over. ASKED: `mpidist launch`
#: asks it to. HANDED: the attempt offers its state, and the text of the file says where it is.
#: DECIDED: a symbolic link whose target is a text that says which attempt continues.
CAN, ASKED, HANDED, DECIDED = "can-hand-over", "hand-over", "handed-over", "decided"
#: The file by which the attempt that takes the run over says that all its ranks are ready.
READY = "ready"
#: The possible texts of DECIDED: the next attempt continues, with the state in the memory of the
#: only host, or in the checkpoint store; or the first attempt keeps its run.
IN_MEMORY, IN_STORE, KEPT = "memory", "store", "kept"
#: The exit code of a rank that ends itself because its attempt (start of the job) is over.
ORPHAN = 70
#: Seconds between two heartbeats of a rank, and between two updates of the time of the folder for
#: copies.
INTERVAL, TOUCHED_EVERY = 1.0, 60.0

_BEAT, _STEP, _FIRST, _LEFT, _PID, _HEARD, _FAILED, _PEAK, _KILLS = range(9)
_CODE, _DEATHS, _GAVE_UP = range(13, 16)
_NUMBERS = struct.Struct("<16q")
_BYTES = 256
_NONE = -1  # no step yet


class Sign(NamedTuple):
    """The heartbeat of one rank: what the rank has written to its file.

    `first` is the number of the step with which this start of the program began. `left` is true if
    the rank has ended by itself, `heard` if a signal has asked the rank to end, and `failed` if an
    error of the rank ends the job.

    `peak` is the largest number of bytes of memory that the rank has held, and `limit` the memory
    limit in bytes of the rank's control group, or 0 without a limit. `kills` is the number of
    processes of the control group that the kernel has killed so far for lack of memory, and
    `kills_before` is that number when the rank began; both are -1 if unknown.

    `code` is the exit code of a rank, if all living ranks have agreed to end; before, it is -1.
    `gave_up` is 1 if this rank could not continue after a death.
    """

    rank: int
    beat: int
    step: int | None
    first: int | None
    left: bool
    pid: int
    host: str
    heard: bool = False
    failed: bool = False
    peak: int = 0
    kills: int = -1
    kills_before: int = -1
    limit: int = 0
    group: int = 0
    born: int = 0
    code: int = _NONE
    deaths: int = 0
    gave_up: int = 0


class Pulse:
    """The heartbeat file of a rank, and the thread that increments the counter in the file."""

    def __init__(self, folder: Path, rank: int, launcher: str = "", copies: Path | None = None):
        self._folder, self._launcher, self._copies = folder, launcher, copies
        self._group = group_of()
        kills = self._killed()
        limit = (self._group.limit() or 0) if self._group else 0
        group = self._group.folder.stat().st_ino if self._group else 0
        with (folder / f"rank-{rank}").open("xb+") as file:
            begin = 0, _NONE, _NONE, 0, os.getpid(), 0, 0, peak_memory(), kills, kills, limit, group
            last = int(born("self") or 0), _NONE, 0, 0
            text = _NUMBERS.pack(*begin, *last) + socket.gethostname().encode()
            file.write(text.ljust(_BYTES, b"\0"))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self.numbers = memoryview(self._map).cast("q")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpidist-pulse", daemon=True)
        self._thread.start()

    def note(self, step: int) -> None:
        """Write the number of finished steps to the heartbeat file."""
        if self.numbers[_FIRST] == _NONE:
            self.numbers[_FIRST] = step
        self.numbers[_STEP] = step

    def leave(self) -> None:
        """Write to the heartbeat file that this process ends by itself."""
        self._stop.set()
        self.numbers[_LEFT] = 1
        self.flush()

    def flush(self) -> None:
        """Make the newest heartbeat of this rank visible on other hosts now."""
        with contextlib.suppress(OSError):
            self._map.flush()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.numbers[_BEAT] += 1
            self.numbers[_PEAK], self.numbers[_KILLS] = peak_memory(), self._killed()
            self.flush()
            if self._copies and self.numbers[_BEAT] * INTERVAL % TOUCHED_EVERY == 0:
                with contextlib.suppress(OSError):
                    os.utime(self._copies)
            if self._is_over():
                # The next attempt may already run, so this attempt must not write anything any
                # more.
                os.write(2, b"mpidist: this attempt is over for its launcher; the rank ends\n")
                os._exit(ORPHAN)
            if not is_at_work(self._launcher, elsewhere=True):
                os.write(2, b"mpidist: mpidist launch is gone; the rank asks for a stop\n")
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _killed(self) -> int:
        kills = self._group.kills() if self._group else None
        return -1 if kills is None else kills

    def _is_over(self) -> bool:
        try:
            return has(self._folder, OVER)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # a shared file system may be unavailable for a while


_pulse: Pulse | None = None


def join(environ: Mapping[str, str] | None = None) -> None:
    """Begin to write heartbeats if `mpidist launch` started this process.

    A second call does nothing.
    """
    global _pulse
    environ = os.environ if environ is None else environ
    if _pulse is not None or FOLDER not in environ:
        return
    # If the file exists already, this process is not a rank: a rank has started this process, which
    # has inherited the rank's environment.
    with contextlib.suppress(FileExistsError):
        rank, launcher = rank_hint(environ), environ.get(LAUNCHER, "")
        _pulse = Pulse(Path(environ[FOLDER]), rank, launcher, memory_folder(environ))
        atexit.register(_pulse.leave)
        os.register_at_fork(after_in_child=_be_silent)


def _be_silent() -> None:
    """Stop the heartbeats in a forked process, because it is not a rank."""
    global _pulse
    if _pulse is not None:
        atexit.unregister(_pulse.leave)
    _pulse = None


_step_ended: float | None = None
_longest_step: float | None = None


def note_steps(step: int) -> None:
    """Write the number of finished steps to the heartbeat file, if `mpidist launch` reads it."""
    global _step_ended, _longest_step
    if _pulse is not None:
        _pulse.note(step)
    now = time.monotonic()
    if _step_ended is not None:
        _longest_step = max(_longest_step or 0.0, now - _step_ended)
    _step_ended = now


def longest_step() -> float | None:
    """Return the longest time in seconds from one step to the next, saves included, or None."""
    global _step_ended
    _step_ended = None
    return _longest_step


def hear() -> None:
    """Write to the heartbeat file that a signal has asked this process to end."""
    if _pulse is not None:
        _pulse.numbers[_HEARD] = 1


def fail() -> None:
    """Write to the heartbeat file that an error of this process ends the job."""
    if _pulse is not None:
        _pulse.numbers[_FAILED] = 1


def note_exit(code: int) -> None:
    """Write this rank's exit code to its heartbeat file, once all living ranks agree to end."""
    if _pulse is not None:
        _pulse.numbers[_CODE] = code
        _pulse.leave()


def note_deaths(count: int) -> None:
    """Write to the heartbeat file how many deaths of other ranks this process has survived."""
    if _pulse is not None:
        _pulse.numbers[_DEATHS] = count


def give_up() -> bool:
    """Ask `mpidist launch` to end all ranks; return whether this process has such a launcher."""
    if _pulse is None:
        return False
    _pulse.numbers[_GAVE_UP] = 1
    _pulse.flush()
    return True


def tell_launcher(name: str, text: str = "") -> None:
    """Send `mpidist launch` a message: write `text` to the file `name` in its folder."""
    folder = attempt_folder()
    if folder is not None:
        (folder / name).write_text(text, encoding="utf-8")


def make_decision(folder: Path, text: str) -> bool:
    """Decide which of two starts of the program continues a run.

    When a job gets more ranks, the program is started again while its first start, which uses
    `folder`, still runs. `text` is `KEPT` if the first start keeps the run. Otherwise the new start
    takes the run over, and `text` says where it finds the state: `IN_MEMORY` (of the host) or
    `IN_STORE` (the checkpoint store). Only the first decision counts. Returns whether `text` is the
    first decision.
    """
    try:
        # A symbolic link is made in one step together with its text. A file could stay empty,
        # because the process that makes it is killed or the disk is full, and all processes would
        # wait for the decision for ever.
        (folder / DECIDED).symlink_to(text)
    except FileExistsError:
        return decision(folder) == text
    return True


def decision(folder: Path) -> str:
    """Return the text that `make_decision` has recorded in `folder`, or "" without a decision."""
    with contextlib.suppress(OSError):
        if has(folder, DECIDED):
            return str((folder / DECIDED).readlink())
    return ""


def launched_by(environ: Mapping[str, str] | None = None) -> str:
    """Return the text that identifies the `mpidist launch` that started this process, or ""."""
    return (os.environ if environ is None else environ).get(LAUNCHER, "")


def is_launched() -> bool:
    """Return whether the `mpidist launch` that started this process still runs.

    The result is also true without a launcher, and if the launcher is on another host.
    """
    return is_at_work(launched_by(), elsewhere=True)


def attempt(environ: Mapping[str, str] | None = None) -> int:
    """Return how often `mpidist launch` had started this job's program before this start."""
    return int((os.environ if environ is None else environ).get(ATTEMPT, "0"))


def launcher_id() -> str:
    """Return a text that identifies this process as launcher: host, pid, and start time."""
    return f"{socket.gethostname()} {os.getpid()} {born('self')}"


def is_at_work(launcher: str, elsewhere: bool) -> bool:
    """Return whether a launcher still runs; for a launcher on another host, return `elsewhere`."""
    words = launcher.split()
    if len(words) != 3 or words[0] != socket.gethostname():
        return elsewhere
    return is_running(words[1]) and born(words[1]) == words[2]


def has(folder: Path, name: str) -> bool:
    """Return whether the folder has a file called `name`, even if another host has just made it."""
    # A list of the folder also shows files that other hosts have just made.
    return any(path.name == name for path in folder.iterdir())


def read_heartbeats(folder: Path) -> list[Sign]:
    """Return the heartbeats of all ranks whose heartbeat files are in `folder`, in rank order."""
    signs = []
    for path in folder.glob("rank-*"):
        with contextlib.suppress(OSError, ValueError):
            data = path.read_bytes()
            if len(data) == _BYTES:  # otherwise the rank is still making the file
                beat, step, first, left, pid, heard, failed, *more = _NUMBERS.unpack_from(data)
                host = data[_NUMBERS.size :].rstrip(b"\0").decode(errors="replace")
                rank = int(path.name.partition("-")[2])
                known = _known(step), _known(first), bool(left), pid, host
                signs.append(Sign(rank, beat, *known, bool(heard), bool(failed), *more))
    return sorted(signs)


def _known(step: int) -> int | None:
    return None if step == _NONE else step
