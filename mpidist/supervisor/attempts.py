"""Run a program under an MPI launcher until it is done; start it again after a failure.

An attempt is one start of the program on all ranks. `mpidist launch` itself does not use MPI, and
starts the launcher (such as mpiexec) in a session of its own. An environment variable marks all
processes that the launcher starts. After the end of the launcher, `mpidist launch` kills all
processes with this mark that still run on this host. Ranks on other hosts notice a file in the
shared folder which says that the attempt is over, and end themselves (`mpidist.launch.heartbeat`).

    DIR/history.jsonl      one line for each attempt and decision
    DIR/memory             the name of the folder in /dev/shm for copies of the state
    DIR/selection-*.json   the choices of `algorithm="auto"`, for later attempts
    DIR/attempt-0/rank-3   the heartbeat of rank 3
    DIR/attempt-0/launcher the process that has started the attempt
    DIR/attempt-0/begun    exists once the program has begun on some host
    DIR/attempt-0/over     exists once all processes of the attempt must end
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ..errors import ConfigError
from ..launch import heartbeat
from ..launch.environment import MEMORY_FOLDER
from ..launch.launchers import launch_environment
from ..launch.process_table import stat_of
from ..launch.processes import end_marked, forgotten_segments, marked, mpi_segments, remove_session
from . import commands
from .deaths import Deaths
from .hosts import (
    AttemptPlace,
    LaunchedJob,
    doubted,
    grown,
    print_line,
    room,
    usable,
    with_todays_hosts,
    without_culprits,
)
from .liveness import Launcher, Vigil
from .memory_folder import make_memory_folder, remove_memory_folder
from .memory_kills import MemoryKills
from .policy import Action, Attempt, decide
from .requests import JobRequest, Requests

#: The environment variable that marks all processes of an attempt.
MARK = "MPIDIST_LAUNCH_MARK"
#: Seconds that a launcher has to end its ranks after SIGTERM.
PATIENCE = 5.0
#: Seconds that a launcher has to end by itself after all its ranks were killed.
QUICK = 0.3

#: The command that a launcher starts: it makes a file, and then becomes the program.
_BEGIN = 'true 2>/dev/null >"$1"; shift; exec "$@"'
#: The same before it, for ranks that survive a death: nobody would notice one before they have met.
_SAY_PID = (
    "read host </proc/sys/kernel/hostname; "
    'echo "$$ $host" 2>/dev/null >"$1-$OMPI_COMM_WORLD_RANK"; '
)

_ASK = (signal.SIGUSR1, signal.SIGTERM)
_HEARD = (*_ASK, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def run(job: LaunchedJob) -> int:
    """Start `job`, and start it again after failures, until it ends; return the exit code."""
    job.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    attempts = read_history(job.folder)
    number = next_attempt(job.folder, len(attempts))
    job = with_todays_hosts(job)
    place = AttemptPlace(job.hosts, tuple(job.hosts or ()), named=not job.slurm)
    place = without_culprits(job, attempts, place)
    ranks = min(job.ranks, room(job, place.hosts))
    # The signals are blocked, and `watch` waits for them, because a signal handler could run
    # between any two lines of this function.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    memory, action = make_memory_folder(job.folder), None
    requests = Requests(job.folder, job.notice)
    try:
        while True:
            unstarted = sum(attempt.unstarted for attempt in attempts)
            one = _Running(job, number, number - unstarted, ranks, place, memory, requests)
            attempts.append(doubted(job, one.watch(), place))
            number += 1
            _note(job.folder, "attempt", attempts[-1]._asdict())
            if not attempts[-1].finished:
                job = with_todays_hosts(grown(job, attempts[-1].more))
                if job.hosts_from or (attempts[-1].failed and not attempts[-1].asked):
                    there = usable(job, place, attempts[-1].unstarted)
                    place = without_culprits(job, attempts, there)
            action = decide(attempts, job.policy, job.ranks, room(job, place.hosts))
            out = place.left_out(job)
            _note(job.folder, "decision", {**action._asdict(), "left_out": out})
            _tell(one.known_as, attempts, action, len(place.hosts or ()) if out else 0)
            if action.what == "relaunch" and _asked_within(action.pause):
                attempts[-1] = attempts[-1]._replace(asked=True)
                action = decide(attempts, job.policy, job.ranks, action.ranks)
                _note(job.folder, "decision", action._asdict())
                print_line(f"asked to stop before the next attempt; {action.reason}")
            if action.what != "relaunch":
                return _finish(job, action)
            ranks = action.ranks
    finally:
        requests.close()
        remove_memory_folder(job, memory, action is not None and action.code == 0, place.hosts)
        # A signal that came while this function ended asks for a stop that has happened already.
        # Such a signal must not end this process before the exit code is returned.
        while signal.sigtimedwait(_HEARD, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _finish(job: LaunchedJob, action: Action) -> int:
    if action.what == "requeue":
        done = subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
        if done.returncode:
            print_line("scontrol requeue failed; exit code 75 says that the job is not finished")
    if action.code == 0:
        remove_control_folder(job.folder)
    else:
        print_line(f"the records of this job are in {job.folder}")
    return action.code


def _asked_within(seconds: float) -> bool:
    """Wait before the next attempt; return whether a signal asked for a stop meanwhile."""
    return signal.sigtimedwait((*_ASK, signal.SIGINT, signal.SIGHUP), seconds) is not None


class _Running:
    """One attempt: its launcher, its folder, and the environment variable that marks its processes.

    `number` is in the name of the attempt's folder, and no later attempt gets the same number.
    `known_as` is the attempt's number that the program and the user see, which does not count
    earlier attempts in which the launcher has started no process.
    """

    def __init__(
        self,
        job: LaunchedJob,
        number: int,
        known_as: int,
        ranks: int,
        place: AttemptPlace,
        memory: Path | None,
        requests: Requests,
    ):
        self.job, self.known_as, self.ranks, self.requests = job, known_as, ranks, requests
        self.request: JobRequest | None = None
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
        }
        slurm = {**commands.BESIDE_OTHERS} if number and "SLURM_JOB_ID" in os.environ else {}
        if job.slurm and job.hosts:
            slurm |= commands.slurm_environ(os.environ, list(job.hosts), place.left, ranks)
        words = commands.command(ranks, job.words, place.hosts, restricted=place.named)
        if job.elastic:
            words = commands.surviving(words)
        self.kind = kind = commands.kind_of(words)
        if kind == "openmpi":
            # Other launchers pass the whole environment on, also to other hosts.
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
        """Unblock signals and remove an old Open MPI session folder before the launcher begins."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        remove_session(os.getpid(), self.environment)

    def watch(self) -> Attempt:
        """Wait until the attempt ends, or end the attempt if necessary; return its result."""
        asked, why, deadline = False, "", float("inf")
        while self.process.poll() is None:
            heard = signal.sigtimedwait(_HEARD, self.job.limits.interval(self.ranks))
            now = time.monotonic()
            number = heard.si_signo if heard else None
            if number in (signal.SIGINT, signal.SIGHUP):
                why, asked = "interrupted", True
            elif number in _ASK and not asked:
                asked, deadline = True, self._ask(signal.Signals(number).name, now)
            elif self.process.poll() is None:
                with contextlib.suppress(OSError):  # shared file systems may fail for a while
                    why = self._look(now)
                    if self.request is None and self._listens():
                        self.request = self.requests.look()
                        if self.request is not None:
                            deadline = self._ask(self.request.text, now)
                if self.vigil.over:  # Open MPI's launcher may wait for ever for ranks that died
                    break
                if now > deadline:
                    why = f"the ranks did not exit within {self.job.limits.grace:g} s"
            if why:
                print_line(f"attempt {self.known_as} is ended: {why}")
                break
        self._end()
        self.deaths.close()
        return self._result(asked, why)

    def _ask(self, why: str, now: float) -> float:
        """Ask the ranks to save and leave; return the time by which they must have left."""
        print_line(f"{why}: the ranks are asked to save and exit")
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        return now + self.job.limits.grace

    def _listens(self) -> bool:
        """Return whether the ranks are in their loop; before it, the signal would end them."""
        signs = self.vigil.signs
        return self.begun and (not signs or any(sign.step is not None for sign in signs))

    def _look(self, now: float) -> str:
        """Return the reason for which this attempt must end, or "" if it may continue."""
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
            # Open MPI's launcher waits half a second for the other ranks to exit by themselves,
            # which they cannot. After this kill the launcher ends at once, with the exit code of
            # the first dead rank. A rank that a signal has asked to end is ending already, and
            # needs no kill.
            self.deaths.kill()
        return why

    def _watch_begun(self, ended: set[int]) -> dict[int, int]:
        """Watch the ranks of this host that have begun; return their process IDs by rank.

        Processes that are gone already are added to `ended`.
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
            # Ranks that may wait for a dead one for ever, in MPI, would not hear a signal to end.
            self.deaths.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(QUICK)
        # A killed MPI library leaves its shared memory behind; find it while it is still mapped.
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
            # Kill processes of the group that have lost the variable `MARK`. When the launcher is
            # gone, another group may get the number of its group, so this is done only if the
            # launcher was still running.
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
                # A ``raise SystemExit(4)`` is known to the launcher only.
                own = code if 0 < code < 128 and not self.vigil.over else 0
                code = max(codes) or own
            elif code == 0:
                hint = "" if signs else "; a program under --elastic uses md.elastic or md.train"
                # The launcher may end before `vigil` has looked.
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
    """Return whether a process has a variable, such as ``b"NAME=value"``, in its environment."""
    with contextlib.suppress(OSError):
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _unnameable(environment: Mapping[str, str]) -> list[str]:
    """Return an `env` command that sets variables that /bin/sh may drop, such as bash functions."""
    odd = {name for name in environment if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)}
    return ["env", *(f"{name}={environment[name]}" for name in sorted(odd))] if odd else []


# ------------------------------------------------------------------------------------- telling


def _tell(known_as: int, attempts: Sequence[Attempt], action: Action, fewer_hosts: int) -> None:
    last = attempts[-1]
    if last.finished and len(attempts) == 1 and not last.survived:
        return
    what, then = f"attempt {known_as} on {last.ranks} ranks: {last.text()}", action.reason
    if action.what == "relaunch":
        pause = f" in {action.pause:g} s" if action.pause else ""
        where = f" on {fewer_hosts} host{'s' * (fewer_hosts > 1)}" if fewer_hosts else ""
        then = f"again{pause} with {action.ranks} ranks{where}, {action.reason}"
    print_line(f"{what} ({last.seconds:g} s); {then}")


def _note(folder: Path, kind: str, facts: dict) -> None:
    line = json.dumps({"time": round(time.time(), 3), "event": kind, **facts}) + "\n"
    try:
        with (folder / "history.jsonl").open("a+b") as file:
            file.seek(0)
            # Remove half a line of a killed launcher, which would make this line unreadable too.
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode())
    except OSError as error:  # a full disk must not end a job that can go on without a history
        print_line(f"the history is not written: {error}")


def next_attempt(folder: Path, known: int) -> int:
    """Return the number of the next attempt, if ``history.jsonl`` has `known` attempts.

    If `mpidist launch` was killed, its last attempt has a folder, but is not in ``history.jsonl``.
    This function marks an attempt of a killed `mpidist launch` as over, so that the ranks of this
    attempt end. Old attempts are marked as over because a requeued job may start on another host,
    where nothing shows whether the old processes still run.

    Raises
    ------
    ConfigError
        Another `mpidist launch`, which uses the same folder, still runs on this host.
    """
    number = known
    while (attempt := folder / f"attempt-{number}").exists():
        if not (attempt / heartbeat.OVER).exists():
            with contextlib.suppress(FileNotFoundError):
                name = (attempt / heartbeat.LAUNCHER_FILE).read_text(encoding="utf-8")
                if heartbeat.is_at_work(name, elsewhere=False):
                    raise ConfigError(
                        f"{folder} is in use by another mpidist launch; wait for it or stop it, "
                        "or give another folder with --control DIR"
                    )
                (attempt / heartbeat.OVER).touch()
        number += 1
    return number


def remove_control_folder(folder: Path) -> None:
    """Remove the files of `mpidist launch` from a control folder, and the folder if it is empty."""
    for attempt in folder.glob("attempt-*"):
        if (attempt / heartbeat.LAUNCHER_FILE).exists():
            shutil.rmtree(attempt, ignore_errors=True)
    with contextlib.suppress(OSError):
        ours = (*folder.glob("selection-*.json"), folder / "history.jsonl", folder / "memory")
        for path in ours:
            path.unlink(missing_ok=True)
        folder.rmdir()


def read_history(folder: Path) -> list[Attempt]:
    """Return all attempts of this job so far, including those before the job was requeued.

    Raises
    ------
    ConfigError
        The file ``history.jsonl`` in `folder` is not a history of `mpidist launch`.
    """
    try:
        data = (folder / "history.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    try:
        # A launcher that was killed while it wrote has left half a line, which does not count.
        events = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        return [
            Attempt(**{name: facts[name] for name in Attempt._fields if name in facts})
            for facts in events
            if facts["event"] == "attempt"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}/history.jsonl is not a history of mpidist: {error}") from None
