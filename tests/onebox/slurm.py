"""Run a Slurm cluster of several nodes on this machine, with real daemons, for a ``with`` block.

::

    with slurm_cluster(nodes=4) as cluster:
        job = cluster.sbatch("jobs/allreduce.sbatch", timeout=60)
        print(job.state, job.exit_code, job.output)

A `Box` runs one munged, one slurmctld, and one ``slurmd -N nI`` for each node, with their own
ports, key and state. Each node has its own /dev/shm and host name, so that MPI sees as many hosts
as Slurm has nodes. A Slurm or munge of the machine itself is neither used nor changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mpidist.errors import ConfigError, MpidistError
from mpidist.launch.processes import Finished, Started
from onebox.box import Box, missing
from onebox.slurm_files import configure

#: What apt-get has to install on Debian and Ubuntu.
PACKAGES = "slurm-wlm munge libpmix2"
#: Seconds between Slurm's looks at time limits; a constant in its source.
LIMIT_CHECK_EVERY = 30
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")


@dataclass(frozen=True)
class Job:
    """What Slurm knows of a batch job: state, exit code, signal, restarts, output file."""

    id: int
    state: str
    exit_code: int
    signal: int
    restarts: int
    output_file: Path
    fields: Mapping[str, str]

    @property
    def output(self) -> str:
        """What the job has written so far."""
        path = self.output_file
        return path.read_text(errors="replace") if path.exists() else ""


class SlurmCluster:
    """A running cluster; made by `slurm_cluster`. Its methods are all local."""

    def __init__(self, box: Box, env: dict[str, str], directory: Path, logs: Path):
        self.box = box
        self.env = env
        self.directory = directory
        self.logs = logs

    def run(
        self,
        args: Sequence[str | os.PathLike],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        timeout: float = 60,
    ) -> Finished:
        """Run a command, such as ``["srun", "-n", "4", ...]``, as on the login node. Local."""
        environment = {**self.env, **(env or {})}
        where = cwd or self.directory
        return self.box.run(args, env=environment, cwd=where, timeout=timeout, sweep=False)

    def submit(
        self,
        script: str | os.PathLike,
        *args: str | os.PathLike,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        cwd: str | os.PathLike | None = None,
    ) -> int:
        """Give a script to sbatch and return the job's id at once. Local."""
        command = ["sbatch", "--parsable", *options, os.fspath(script), *args]
        return int(self.run(command, env=env, cwd=cwd).check().stdout.split(";")[0])

    def sbatch(
        self,
        script: str | os.PathLike,
        *args: str | os.PathLike,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        cwd: str | os.PathLike | None = None,
        timeout: float = 60,
    ) -> Job:
        """Give a script to sbatch and wait for the job's end. Local.

        Parameters
        ----------
        script : path
            The batch script.
        *args : str
            Its arguments.
        env : mapping, optional
            Added to the environment that sbatch hands on.
        options : sequence of str
            Command line options of sbatch, which overrule the ``#SBATCH`` lines.
        timeout : float
            Seconds; the job is cancelled and ``TimeoutError`` raised after it.
        """
        return self.wait(self.submit(script, *args, env=env, options=options, cwd=cwd), timeout)

    def job(self, job_id: int) -> Job:
        """Ask Slurm about a job. Local."""
        text = self.run(["scontrol", "show", "job", str(job_id)]).check().stdout
        text = text.partition("\n\n")[0]  # of a heterogeneous job, the first component
        fields = dict(re.findall(r"(\S+?)=(.*?)(?=\s+\S+?=|\s*$)", text, re.MULTILINE))
        code, _, signal = fields["ExitCode"].partition(":")
        return Job(
            job_id,
            fields["JobState"],
            int(code),
            int(signal or 0),
            int(fields["Restarts"]),
            Path(fields.get("StdOut", os.devnull)),
            fields,
        )

    def wait(self, job_id: int, timeout: float = 60) -> Job:
        """Wait until a job has ended for good: a requeued job has not. Local."""
        deadline = time.monotonic() + timeout
        while True:
            job = self.job(job_id)
            if job.state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED"):
                # Between the end of the script and the requeue it asked for, Slurm shows an end
                # state for a moment; a second look a little later tells them apart.
                time.sleep(0.3)
                again = self.job(job_id)
                if (again.state, again.restarts) == (job.state, job.restarts):
                    return job
            elif time.monotonic() > deadline:
                self.run(["scancel", str(job_id)])
                raise TimeoutError(
                    f"job {job_id} was {job.state} after {timeout:g} s "
                    f"({job.fields.get('Reason')}); its output:\n{job.output[-4000:]}"
                )
            time.sleep(0.2)

    def next_limit_check(self) -> float:
        """Seconds until Slurm next looks at time limits and sends ``--signal``. Local.

        It does so every 30 s, and sends a signal up to 30 s too early rather than too late: the
        signal of a job that is within 30 s of its due time comes exactly then.
        """
        log = (self.logs / "slurmctld.log").read_text(errors="replace")
        # The first look comes a whole interval after the start.
        seen = re.findall(r"\[(\S+)\] (?:debug2: Testing job time limits|Running as primary)", log)
        since = (datetime.now() - datetime.fromisoformat(seen[-1])).total_seconds()
        return LIMIT_CHECK_EVERY - since % LIMIT_CHECK_EVERY


def unavailable() -> str | None:
    """Say in one line why there can be no Slurm cluster here, or None. Local."""
    return missing(_PROGRAMS, PACKAGES)


@contextlib.contextmanager
def slurm_cluster(
    nodes: int = 4,
    directory: str | os.PathLike | None = None,
    *,
    cpus: int = 2,
    gpus: int = 0,
    requeue_delay: int = 5,
    kill_wait: int = 5,
    start_timeout: float = 60,
) -> Iterator[SlurmCluster]:
    """Bring up a Slurm cluster on this machine, and tear it down whatever happens. Local.

    Parameters
    ----------
    nodes : int
        Nodes n1, n2, ...; all on this machine's cores.
    directory : path, optional
        Where commands run and jobs start, so that their paths are relative to it; the daemons'
        logs go to slurm-logs in it. None is a temporary folder, removed at the end.
    cpus : int
        Cores that each node claims to have.
    gpus : int
        GPUs that each node claims to have; Slurm hands them out, but no device is behind them.
    requeue_delay : int
        Seconds before a requeued job may start again; Slurm takes no less than 5.
    kill_wait : int
        Seconds between SIGTERM and SIGKILL at a job's time limit.
    start_timeout : float
        Seconds for all nodes to become idle.

    Raises
    ------
    ConfigError
        No root, no Slurm packages, no namespaces, or a daemon that does not start; the message
        quotes its log.
    """
    if reason := unavailable():
        raise ConfigError(f"no Slurm cluster on this machine: {reason}")
    with Box() as box:
        home = Path(directory).resolve() if directory else box.folder / "home"
        logs = home / "slurm-logs"
        logs.mkdir(parents=True, exist_ok=True)
        env = configure(
            *(box.folder, logs, nodes),
            cpus=cpus,
            gpus=gpus,
            requeue_delay=requeue_delay,
            kill_wait=kill_wait,
        )
        cluster = SlurmCluster(box, env, home, logs)
        daemons: list[Started] = []
        try:
            _start(cluster, nodes, daemons, start_timeout)
            _wait_idle(cluster, nodes, daemons, start_timeout)
            yield cluster
        finally:
            box.close()
            for daemon in daemons:
                daemon.finish(5)


def _start(cluster: SlurmCluster, nodes: int, daemons: list[Started], timeout: float) -> None:
    """Start munged, slurmctld and the slurmds in the foreground, in that order."""
    box, env, run = cluster.box, cluster.env, cluster.box.folder
    box.run(["mount", "--bind", run / "hosts", "/etc/hosts"]).check()
    _offer_pmix(box)

    def daemon(*words) -> None:
        daemons.append(box.start(words, env=env, cwd=run))

    daemon(
        *("munged", "--foreground", "--force", f"--socket={run}/munge.socket"),
        *(f"--key-file={run}/munge.key", f"--pid-file={run}/munge.pid"),
        *(f"--log-file={cluster.logs}/munged.log", f"--seed-file={run}/munge.seed"),
    )
    _until(lambda: (run / "munge.socket").exists(), daemons, timeout, "munged has no socket")
    daemon("unshare", "--uts", "sh", "-c", "hostname ctl && exec slurmctld -D -i")
    for i in range(1, nodes + 1):
        # Own /dev/shm, IPC and host name make the node a node for MPI too.
        body = f"mount -t tmpfs tmpfs /dev/shm && hostname n{i} && exec slurmd -D -N n{i}"
        daemon("unshare", "--mount", "--ipc", "--uts", "sh", "-c", body)


def _offer_pmix(box: Box) -> None:
    """Let Slurm's plugin find libpmix by the unversioned name that only its -dev package has."""
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    match = re.search(r"libpmix\.so\.\d+ .*=> (\S+)", known)
    if match is None:
        raise ConfigError(f"no libpmix for srun --mpi=pmix: apt-get install {PACKAGES}")
    library = Path(match[1]).resolve()
    if not (library.parent / "libpmix.so").exists():
        # Seen in the box only: the machine's own folder stays as it is.
        ours = box.folder / "lib"
        ours.mkdir()
        (ours / "libpmix.so").symlink_to(library.name)
        layers = f"lowerdir={ours}:{library.parent}"
        said = box.run(["mount", "-t", "overlay", "overlay", "-o", layers, library.parent])
        if said.returncode:
            raise ConfigError(f"no {library.parent}/libpmix.so: apt-get install libpmix-dev")


def _wait_idle(cluster, nodes: int, daemons: list[Started], timeout: float) -> None:
    def idle() -> bool:
        said = cluster.run(["sinfo", "--noheader", "--Node", "--format=%T"])
        return said.stdout.split() == ["idle"] * nodes

    _until(idle, daemons, timeout, "the nodes did not become idle", cluster.logs)


def _until(test, daemons, timeout: float, what: str, logs: Path | None = None) -> None:
    """Poll `test`; fail at once, with what it said, when a daemon has died."""
    deadline = time.monotonic() + timeout
    while True:
        dead = [d for d in daemons if d.process.poll() is not None]
        if not dead and test():
            return
        if dead or time.monotonic() > deadline:
            said = [f"{' '.join(d.args[-4:])}: {d.finish(0).stderr.strip()}" for d in dead]
            if logs is not None:
                said += [f"{p.name}: {p.read_text()[-1500:]}" for p in sorted(logs.iterdir())]
            raise MpidistError(f"no Slurm cluster: {what} in {timeout:g} s\n" + "\n".join(said))
        time.sleep(0.1)
