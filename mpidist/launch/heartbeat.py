"""What a rank tells the `mpidist launch` that started it: that it lives, its step, that it left.

One file per rank in the folder of this attempt, mapped into memory, so that a step costs one
store and is known even if the next thing that happens is SIGKILL. A thread without MPI counts
beats, and looks whether this attempt is over, or the launcher gone:

    rank 0   beat 41  step 812  left      it ended by itself
    rank 1   beat 37  step 811            it was killed, or it stands still
    rank 2   beat 41  step 811  failed    an error of its own has ended the job
    rank 3   beat 41  step 811  heard     somebody asked it to end, by a signal

The launcher's exit code alone proves nothing: Open MPI's is 0 after a kill under fault tolerance.
A rank that ends by itself says so, and one that is killed cannot.
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
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .claims import rank_hint
from .control_groups import group_of, peak_memory
from .environment import ATTEMPT_FOLDER
from .process_table import born, is_running

#: Environment variables by which `mpidist launch` reaches its ranks: the folder of this attempt,
#: its number (from 0), and ``HOST PID BORN`` of the process that launched it.
FOLDER, ATTEMPT, LAUNCHER = ATTEMPT_FOLDER, "MPIDIST_ATTEMPT", "MPIDIST_LAUNCHER"
#: The file that appears in the folder when the attempt is over, whoever still runs.
OVER = "over"
#: The file that appears when the program begins anywhere: the launcher has started something.
BEGUN = "begun"
#: The exit code of a rank whose attempt is over.
ORPHAN = 70
#: Seconds between two beats.
INTERVAL = 1.0

_BEAT, _STEP, _FIRST, _LEFT, _PID, _HEARD, _FAILED, _PEAK, _KILLS = range(9)
_NUMBERS = struct.Struct("<13q")
_BYTES = 256
_NONE = -1  # no step yet


class Sign(NamedTuple):
    """What one rank has told. `first` is the step that this attempt began with.

    `heard`: it was asked to end by a signal. `failed`: by an error of its own it ends the job.
    `peak`: the most memory it has held. `limit`, `kills`: that of its control group in bytes, 0
    for none, and how many of it the kernel has killed for want of memory, now and `kills_before`
    it began, -1 where nobody counts; `group` is a number of that group on its host. `pid` and
    `born` name its process on its host for ever, unless it is in a container that counts its own.
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


class Pulse:
    """The file of a rank, and the thread that beats."""

    def __init__(self, folder: Path, rank: int, launcher: str = ""):
        self._folder, self._launcher = folder, launcher
        self._group = group_of()
        kills = self._killed()
        limit = (self._group.limit() or 0) if self._group else 0
        group = self._group.folder.stat().st_ino if self._group else 0
        with (folder / f"rank-{rank}").open("xb+") as file:
            begin = 0, _NONE, _NONE, 0, os.getpid(), 0, 0, peak_memory(), kills, kills, limit, group
            text = _NUMBERS.pack(*begin, int(born("self") or 0)) + socket.gethostname().encode()
            file.write(text.ljust(_BYTES, b"\0"))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._numbers = memoryview(self._map).cast("q")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpidist-pulse", daemon=True)
        self._thread.start()

    def note(self, step: int) -> None:
        """Tell the number of steps that are done."""
        if self._numbers[_FIRST] == _NONE:
            self._numbers[_FIRST] = step
        self._numbers[_STEP] = step

    def hear(self) -> None:
        """Tell that a signal asked this process to end."""
        self._numbers[_HEARD] = 1

    def fail(self) -> None:
        """Tell that this process ends the job, by an error of its own."""
        self._numbers[_FAILED] = 1

    def leave(self) -> None:
        """Tell that this process ends by itself. Twice is fine."""
        self._stop.set()
        self._numbers[_LEFT] = 1
        with contextlib.suppress(OSError):
            self._map.flush()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            self._numbers[_BEAT] += 1
            self._numbers[_PEAK], self._numbers[_KILLS] = peak_memory(), self._killed()
            with contextlib.suppress(OSError):
                self._map.flush()  # other hosts see what has left this one
            if self._is_over():
                # The next attempt may run already: nothing more may be written by this one.
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
            return False  # a shared file system may be away for a while


_pulse: Pulse | None = None


def join(environ: Mapping[str, str] | None = None) -> None:
    """Begin to tell, where `mpidist launch` started this process. Twice is fine."""
    global _pulse
    environ = os.environ if environ is None else environ
    if _pulse is not None or FOLDER not in environ:
        return
    # A helper that a rank has started inherits its environment, but is not that rank.
    with contextlib.suppress(FileExistsError):
        _pulse = Pulse(Path(environ[FOLDER]), rank_hint(environ), environ.get(LAUNCHER, ""))
        atexit.register(_pulse.leave)
        os.register_at_fork(after_in_child=_be_silent)


def _be_silent() -> None:
    """Tell nothing in the name of the rank that has forked this process."""
    global _pulse
    if _pulse is not None:
        atexit.unregister(_pulse.leave)
    _pulse = None


def note_steps(step: int) -> None:
    """Tell the number of steps that are done. Costs nothing without a launcher."""
    if _pulse is not None:
        _pulse.note(step)


def hear() -> None:
    """Tell that a signal asked this process to end. Costs nothing without a launcher."""
    if _pulse is not None:
        _pulse.hear()


def fail() -> None:
    """Tell that this process ends the job, by an error of its own. Costs nothing, too."""
    if _pulse is not None:
        _pulse.fail()


def attempt(environ: Mapping[str, str] | None = None) -> int:
    """Return how often `mpidist launch` has started this job before."""
    return int((os.environ if environ is None else environ).get(ATTEMPT, "0"))


def launcher_id() -> str:
    """Return what names this process as a launcher."""
    return f"{socket.gethostname()} {os.getpid()} {born('self')}"


def is_at_work(launcher: str, elsewhere: bool) -> bool:
    """Whether the launcher of this name still runs; `elsewhere` is said of other hosts'."""
    words = launcher.split()
    if len(words) != 3 or words[0] != socket.gethostname():
        return elsewhere
    return is_running(words[1]) and born(words[1]) == words[2]


def has(folder: Path, name: str) -> bool:
    """Whether this file is in the folder; other hosts' are seen in a listing first."""
    return any(path.name == name for path in folder.iterdir())


def read_heartbeats(folder: Path) -> list[Sign]:
    """Return what the ranks of an attempt have told so far, by rank."""
    signs = []
    for path in folder.glob("rank-*"):
        with contextlib.suppress(OSError, ValueError):
            data = path.read_bytes()
            if len(data) == _BYTES:  # else it is only just being made
                beat, step, first, left, pid, heard, failed, *more = _NUMBERS.unpack_from(data)
                host = data[_NUMBERS.size :].rstrip(b"\0").decode(errors="replace")
                rank = int(path.name.partition("-")[2])
                known = _known(step), _known(first), bool(left), pid, host
                signs.append(Sign(rank, beat, *known, bool(heard), bool(failed), *more))
    return sorted(signs)


def _known(step: int) -> int | None:
    return None if step == _NONE else step
