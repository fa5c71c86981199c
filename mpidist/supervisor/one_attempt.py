"""One attempt (start of the program) of `mpidist launch`, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..launch import heartbeat
from ..launch.environment import ATTEMPT_BEFORE, MEMORY_FOLDER
from ..launch.launchers import launch_environment
from ..launch.process_table import stat_of
from ..launch.processes import end_marked, forgotten_segments, marked, mpi_segments, remove_session
from . import commands
from .deaths import Deaths
from .growth import LEAVE, Growth
from .history import free_number
from .hosts import (
    AttemptPlace,
    LaunchedJob,
    grown,
    print_line,
    room,
    usable,
    with_todays_hosts,
    without_culprits,
)
from .liveness import START, Launcher, Vigil
from .memory_kills import MemoryKills
from .policy import Attempt
from .requests import JobRequest, Requests

#: The environment variable that marks all processes of an attempt.
MARK = "MPIDIST_LAUNCH_MARK"
#: Seconds in which a launcher must end its ranks after SIGTERM.
PATIENCE = 5.0
#: Seconds in which a launcher must end by itself after all its ranks were killed.
QUICK = 0.3

#: The shell command that a launcher starts on each rank: it makes a file, and then becomes the
#: program.
_BEGIN = 'true 2>/dev/null >"$1"; shift; exec "$@"'
#: A command before `_BEGIN` for elastic jobs: it writes the process number and the host of the
#: rank. Before the ranks have joined each other, only `mpidist launch` can notice a death.
_SAY_PID = (
    "read host </proc/sys/kernel/hostname; "
    'echo "$$ $host" 2>/dev/null >"$1-$OMPI_COMM_WORLD_RANK"; '
)

#: Signals that ask for a stop, and all signals that `mpidist launch` waits for.
ASK = (signal.SIGUSR1, signal.SIGTERM)
HEARD = (*ASK, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class SharedFacts(NamedTuple):
    """What all attempts (starts of the program) of a job share.

    These are the results of earlier attempts, the folder in /dev/shm for copies of the state, and
    the requests of users.
    """

    attempts: list[Attempt]
    memory: Path | None
    requests: Requests


class RunningAttempt:
    """One attempt (start of the program): its launcher, its folder, the mark of its processes.

    The mark is an environment variable. `number` is in the name of the attempt's folder, and no
    later attempt gets the same number. `known_as` is the number for the program and the user; it
    does not count attempts in which the launcher has started no process. `before` is the previous
    attempt if it still trains and this attempt waits to take over the run. `pending` is a signal
    that came while this attempt waited.
    """

    def __init__(
        self,
        job: LaunchedJob,
        number: int,
        known_as: int,
        ranks: int,
        place: AttemptPlace,
        shared: SharedFacts,
        before: RunningAttempt | None = None,
    ):
        self.job, self.number, self.known_as, self.ranks = job, number, known_as, ranks
        self.place = place
        self._shared, self.requests, memory = shared, shared.requests, shared.memory
        self.request: JobRequest | None = None
        self.growth: Growth[RunningAttempt] | None = None
        self.grown_job = job
        self.pending: int | None = None
        self._signalled = False
        self.folder = job.folder / f"attempt-{number}"
        self.folder.mkdir(mode=0o700)
        (self.folder / heartbeat.LAUNCHER_FILE).write_text(
            heartbeat.launcher_id(), encoding="utf-8"
        )
        self.mark = uuid.uuid4().hex
        told = {
            MARK: self.mark,
            heartbeat.FOLDER: str(self.folder.absolute()),
            heartbeat.ATTEMPT: str(known_as),
            heartbeat.LAUNCHER: heartbeat.launcher_id(),
            **({} if memory is None else {MEMORY_FOLDER: str(memory)}),
            **({} if before is None else {ATTEMPT_BEFORE: str(before.folder.absolute())}),
        }
        slurm = {**commands.BESIDE_OTHERS} if number and "SLURM_JOB_ID" in os.environ else {}
        if job.slurm and job.hosts:
            slurm |= commands.slurm_environ(os.environ, list(job.hosts), place.left, ranks)
        words = commands.command(ranks, job.words, place.hosts, restricted=place.named)
        if job.elastic:
            words = commands.surviving(words)
        self.kind = kind = commands.kind_of(words)
        if kind == "openmpi":
            # Other launchers pass on the whole environment, also to other hosts.
            words += [word for name in told for word in ("-x", name)]
        self.began = time.monotonic()
        self.environment = {**launch_environment(), **slurm, **told}
        self.elastic = commands.SURVIVE[0] in words
        script = commands.quick_start(kind, words[0], self.environment)
        script += (_SAY_PID if self.elastic else "") + _BEGIN
        begin = ["/bin/sh", "-c", script, "mpidist", str(self.folder.absolute() / heartbeat.BEGUN)]
        self.process = subprocess.Popen(
            [*words, *begin, *_unnameable(self.environment), *job.program],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=self._before,
        )
        queues = kind not in ("openmpi", "mpich")
        self.vigil = Vigil(ranks, job.limits, self.began, dead_ends=not self.elastic, queues=queues)
        self.deaths = Deaths()
        self.memory = MemoryKills(self.deaths.order)
        self.begun = False

    def _before(self) -> None:
        """Prepare the launcher's process: unblock signals, remove Open MPI's old session folder."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        remove_session(os.getpid(), self.environment)

    def watch(self) -> Attempt:
        """Wait for the end of the attempt (start of the program), and return its result.

        If the ranks hang, or do not exit after a request, this method ends the attempt.
        """
        asked, why, deadline = False, "", float("inf")
        while self.process.poll() is None:
            interval = self.job.limits.interval(self.ranks)
            listen = signal.sigtimedwait if self.growth is None else self.growth.listen
            heard = listen(HEARD, interval)
            now = time.monotonic()
            number = heard.si_signo if heard else None
            if self.pending is not None and number is None and self._listens():
                number, self.pending = self.pending, None
            if number in (signal.SIGINT, signal.SIGHUP):
                why, asked = "interrupted", True
            elif number in ASK and not asked and not self._passed_on(number):
                asked, deadline = True, self._ask(signal.Signals(number).name, now)
            elif self.process.poll() is None:
                with contextlib.suppress(OSError):  # shared file systems may fail for a while
                    why = self._look(now)
                    if not asked:
                        deadline = min(deadline, self._look_at_requests(now))
                if self.vigil.over:  # Open MPI's launcher may wait for ever for dead ranks
                    break
                if now > deadline:
                    grace = self.job.limits.grace
                    gone = self.growth is not None and self.growth.gone
                    why = f"the ranks did not exit within {LEAVE if gone else grace:g} s"
            if why:
                print_line(f"attempt {self.known_as} is ended: {why}")
                break
        self.end()
        return self._result(asked, why)

    def end(self) -> None:
        """End all processes of this attempt (start of the program on all ranks)."""
        self._end()
        self.deaths.close()

    @property
    def signs(self) -> list[heartbeat.Sign]:
        """The newest heartbeat (sign of life) of each rank, in the order of the ranks."""
        return self.vigil.signs

    def fault(self, now: float) -> str:
        """Return why these new ranks can no longer take over the run; "" if they can."""
        if self.process.poll() is not None:
            return f"its launcher has ended with exit code {self.process.returncode}"
        with contextlib.suppress(OSError):
            if why := self._look(now):
                return why
        if self.deaths.order:
            return "one of its ranks has ended"
        limit = self.job.limits.start or START
        with contextlib.suppress(OSError):
            if now - self.began > limit and not heartbeat.has(self.folder, heartbeat.READY):
                return f"its ranks were not ready within {limit:g} s"
        return ""

    def _passed_on(self, number: int) -> bool:
        """Return whether the ranks that have taken over the run must handle a request to stop."""
        if self.growth is None:
            return False
        if self.growth.call_off():
            print_line(f"attempt {self.known_as + 1} is given up: asked to stop")
            self.growth = None
            return False
        self.growth.new.pending = number
        return True

    def _look_at_requests(self, now: float) -> float:
        """Handle a new request to the job; return the time by which the ranks must have ended."""
        if self.growth is not None:
            return self._look_at_growth(self.growth, now)
        request = self.requests.look() if self.request is None and self._listens() else None
        if request is None:
            return float("inf")
        if request.more and self._can_hand_over():
            self._begin_growth(request)
            return float("inf")
        self.request = request
        return self._ask(request.text, now)

    def _look_at_growth(self, growth: Growth, now: float) -> float:
        """Continue to hand the run over to more ranks, or give this up.

        Returns the time by which the present ranks must have ended.
        """
        if growth.gone:
            return now + LEAVE
        asked, why = growth.asked, growth.look(self.signs, now)
        if growth.asked and not asked:
            self.request = JobRequest("", growth.more)
            return self._ask(f"{growth.new.ranks} ranks are ready", now)
        notice = None if why else self.requests.look(growth=False)
        why = notice.text if notice else why
        if why and growth.call_off():
            left = "" if asked or notice else f"; {self.ranks} ranks go on"
            print_line(f"attempt {self.known_as + 1} is given up: {why}{left}")
            self.growth = None
        if notice:
            self.request = notice
            return self._ask(notice.text, now)
        return float("inf")

    def _can_hand_over(self) -> bool:
        # srun would not start new ranks before the old ranks have ended and freed their cores.
        known = self.kind in ("openmpi", "mpich")
        return known and heartbeat.has(self.folder, heartbeat.CAN)

    def _begin_growth(self, request: JobRequest) -> None:
        """Start the program with more ranks, which wait until these ranks hand their run over."""
        try:
            self._start_more(request)
        except (OSError, ConfigError, subprocess.SubprocessError) as error:
            why = f"no attempt begins: {error}"
            print_line(f"{request.text}, but {why}; {self.ranks} ranks go on")

    def _start_more(self, request: JobRequest) -> None:
        job, shared = grown(with_todays_hosts(self.job), request.more), self._shared
        place = without_culprits(job, shared.attempts, usable(job, self.place))
        ranks = min(job.ranks, room(job, place.hosts))
        if ranks <= self.ranks:
            print_line(f"{request.text}: there is room for {ranks}; {self.ranks} ranks go on")
            return
        print_line(f"{request.text}: {ranks} ranks get ready, and {self.ranks} go on meanwhile")
        number = free_number(job.folder, self.number)
        new = RunningAttempt(job, number, self.known_as + 1, ranks, place, shared, before=self)
        self.grown_job = job
        self.growth = Growth(self.folder, new, request.more)

    def _ask(self, why: str, now: float) -> float:
        """Ask the ranks to save and exit; return the time by which they must have ended."""
        print_line(f"{why}: the ranks are asked to save and exit")
        if not self._signalled:  # a second signal would end ranks that have left their loop
            self._signalled = True
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)
        return now + self.job.limits.grace

    def _listens(self) -> bool:
        """Return whether the ranks handle a signal to stop by now; before, it would kill them."""
        signs = self.vigil.signs
        return self.begun and (not signs or any(sign.step is not None for sign in signs))

    def _look(self, now: float) -> str:
        """Return why this attempt (start of the program) must end, or "" if it may continue."""
        ended = set(self.deaths.order)
        signs = heartbeat.read_heartbeats(self.folder)
        self.deaths.watch(signs)
        self.memory.see(signs)
        self.begun = self.begun or heartbeat.has(self.folder, heartbeat.BEGUN)
        stopped = stat_of(self.process.pid)[0] == "T"
        begun = self._watch_begun(ended) if self.elastic and len(signs) < self.ranks else {}
        why = self.vigil.look(signs, now, ended, Launcher(self.begun, stopped), begun)
        for sign in self.vigil.stuck:
            print_line(f"rank {sign.rank} is killed, so that the others go on: it gave no sign")
            self.deaths.kill([sign.pid])
        if any(not sign.heard for sign in self.vigil.dead):
            # Open MPI's launcher waits for half a second until the other ranks exit by themselves,
            # but they cannot exit. After this kill the launcher ends immediately, with the exit
            # code of the first dead rank. If a signal has asked the dead ranks to end, the other
            # ranks have got it, too, and are not killed.
            self.deaths.kill()
        return why

    def _watch_begun(self, ended: set[int]) -> dict[int, int]:
        """Watch the ranks of this host that have begun; return their process IDs by rank.

        Processes that no longer exist are added to `ended`.
        """
        wanted, found = f"{MARK}={self.mark}".encode(), {}
        for path in self.folder.glob(f"{heartbeat.BEGUN}-*"):
            words = path.read_text(encoding="utf-8").split()
            if words[1:] == [socket.gethostname()]:
                pid = found[int(path.name.partition("-")[2])] = int(words[0])
                if not self.deaths.watch_process(pid, partial(_has, pid, wanted)):
                    ended.add(pid)
        return found

    def _end(self) -> None:
        if self.elastic:
            # Ranks may wait in MPI for a dead rank for ever, and would then not handle a signal.
            self.deaths.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(QUICK)
        # A killed process leaves shared memory of its MPI library behind. It can only be found
        # while a process still has it mapped.
        left = marked(self.mark, MARK)
        segments = mpi_segments(left)
        if late := self.process.poll() is None:
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # so that a stopped launcher cleans up too
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        with contextlib.suppress(OSError):  # the processes must be ended even if the disk is full
            (self.folder / heartbeat.OVER).touch()
        if late:
            # Kill processes of the launcher's process group that do not have the variable `MARK`.
            # After the end of the launcher, another group may get the same number, so this is done
            # only if the launcher was still running.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        end_marked(self.mark, variable=MARK)
        self.process.wait()
        remove_session(self.process.pid, self.environment)
        if self.kind == "mpich" and len(self.vigil.signs) < self.ranks:
            segments |= forgotten_segments(time.monotonic() - self.began)
        for segment in segments:
            segment.unlink(missing_ok=True)

    def _result(self, asked: bool, why: str) -> Attempt:
        begun = True
        with contextlib.suppress(OSError):
            self.vigil.note(heartbeat.read_heartbeats(self.folder))
            begun = self.begun or heartbeat.has(self.folder, heartbeat.BEGUN)
        signs = self.vigil.signs
        steps = [sign.step for sign in signs if sign.step is not None]
        firsts = [sign.first for sign in signs if sign.first is not None]
        code, left, survived = self.process.returncode, sum(sign.left for sign in signs), 0
        if self.elastic and (signs or self.job.elastic):
            # The exit code of Open MPI's launcher is 0 if all ranks were killed.
            if codes := {sign.code: sign.deaths for sign in signs if sign.code >= 0}:
                left, survived = len(signs), max(codes.values())
                # Only the launcher knows the exit code of a ``raise SystemExit(4)``.
                own = code if 0 < code < 128 and not self.vigil.over else 0
                code = max(codes) or own
            elif code == 0:
                hint = "" if signs else "; a program under --elastic uses md.elastic or md.train"
                # The launcher may have ended before `vigil` has noticed the deaths.
                died = len(signs) == self.ranks and not any(sign.left for sign in signs)
                said = "all ranks have died" if died else "no rank has said that the job is done"
                why = why or f"{said}{hint}"
                code = heartbeat.ORPHAN
        return Attempt(
            ranks=self.ranks, code=code, ended=time.time(), survived=survived,
            step=max(steps, default=None), first=min(firsts, default=None), told=len(signs),
            left=left, asked=asked, why=why, more=self.request.more if self.request else 0,
            seconds=round(time.monotonic() - self.began, 1),
            begun=begun, memory="" if asked else self.memory.text(signs),
            culprit=commands.named_like(self.vigil.culprit(), self.job.hosts or ()),
        )  # fmt: skip


def _has(pid: int, variable: bytes) -> bool:
    """Return whether a process has ``b"NAME=value"`` in its environment."""
    with contextlib.suppress(OSError):
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _unnameable(environment: Mapping[str, str]) -> list[str]:
    """Return an `env` command that sets variables that /bin/sh may drop, such as bash functions."""
    odd = {name for name in environment if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)}
    return ["env", *(f"{name}={environment[name]}" for name in sorted(odd))] if odd else []
