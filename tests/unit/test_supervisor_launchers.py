"""`mpidist launch` with scripts as launchers: what it starts, reads, writes and ends."""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mpidist.errors import ConfigError
from mpidist.launch.processes import forgotten_segments
from mpidist.supervisor import attempts, commands, memory_folder
from mpidist.supervisor.policy import Policy


@pytest.fixture
def launcher(tmp_path):
    """The words of a launcher that starts the program once, whatever it is asked for."""
    path = tmp_path / "launcher"
    path.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    path.chmod(0o755)
    return (str(path),)


def test_the_program_has_the_whole_environment(tmp_path, launcher, monkeypatch, capfd):
    """Some shells drop what they cannot name, as the functions that bash hands on: `module`."""
    names = ["BASH_FUNC_module%%", "a.b", "usual"]
    values = ["() {\n echo \"$1 '\n}", "1 = 1", "$HOME"]
    for name, value in zip(names, values, strict=True):
        monkeypatch.setenv(name, value)
    program = tmp_path / "program.py"
    program.write_text("import json, os, sys\nprint(json.dumps([dict(os.environ), sys.argv[1:]]))")
    words = ["*", "a  b", "$HOME", ""]
    control = tmp_path / "a folder's"
    job = attempts.LaunchedJob((sys.executable, str(program), *words), 1, control, words=launcher)
    assert attempts.run(job) == 0
    environ, given = json.loads(capfd.readouterr().out)
    assert [environ[name] for name in names] == values
    assert given == words


@pytest.mark.parametrize(("own", "given"), [(None, "ring"), ("mixed", "mixed")])
def test_srun_starts_with_whole_barriers(tmp_path, launcher, monkeypatch, capfd, own, given):
    """R97: else Open MPI dies in some starts on several hosts; what the user has set stays."""
    monkeypatch.delenv("SLURM_PMIX_FENCE", raising=False)
    if own:
        monkeypatch.setenv("SLURM_PMIX_FENCE", own)
    program = [sys.executable, "-c", "import os; print(os.environ.get('SLURM_PMIX_FENCE'))"]
    job = attempts.LaunchedJob(tuple(program), 1, tmp_path / "control", words=launcher)
    assert attempts.run(job) == 0
    assert capfd.readouterr().out == f"{given}\n"


def test_an_error_of_its_own_leaves_no_process(tmp_path, launcher, monkeypatch):
    """Nobody would end a program that has no heartbeat."""
    started = []

    def watch(attempt):
        started.append(attempt.process)
        raise OSError("the file system is gone")

    monkeypatch.setattr(attempts.RunningAttempt, "watch", watch)
    job = attempts.LaunchedJob(("sleep", "60"), 1, tmp_path / "control", words=launcher)
    with pytest.raises(OSError, match="gone"):
        attempts.run(job)
    assert started[0].poll() is not None


def test_asked_between_two_attempts(tmp_path, launcher, monkeypatch, capsys):
    """R106: it is requeued all the same; and a signal while it ends does not end it otherwise."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    again, finish = attempts._asked_within, attempts._finish

    def asked(seconds):
        # This thread's own: tests before this one may have left threads that block nothing.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        return again(seconds)

    def asked_once_more(*given):
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        return finish(*given)

    monkeypatch.setattr(attempts, "_asked_within", asked)
    monkeypatch.setattr(attempts, "_finish", asked_once_more)
    policy = Policy(preempted="requeue")
    job = attempts.LaunchedJob(("false",), 1, tmp_path / "own", words=launcher, policy=policy)
    assert attempts.run(job) == 75
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
    assert "asked to stop before the next attempt; stopped as asked" in capsys.readouterr().err
    (tmp_path / "asked").unlink()
    job = job._replace(folder=tmp_path / "leaves", policy=Policy())
    assert attempts.run(job) == 75
    assert not (tmp_path / "asked").exists()


def test_memory_that_nobody_has_is_found():
    """R140: of ranks killed in MPI_Init; what is mapped, older, or of another kind stays."""
    names = [f"/dev/shm/{kind}{os.getpid()}" for kind in ("mpich_shm_", "mpich_shm_m", "other_")]
    forgotten, mapped, other = map(Path, names)
    try:
        for path in (forgotten, mapped, other):
            path.write_bytes(bytes(4096))
        with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            found = forgotten_segments(60.0)
            assert forgotten in found
            assert not found & {mapped, other}
        assert forgotten not in forgotten_segments(0.0)
    finally:
        for path in (forgotten, mapped, other):
            path.unlink(missing_ok=True)


def test_transports_that_somebody_has_chosen(tmp_path):
    """Issue 10: one host needs no libfabric for one-sided transfers; a choice stays."""
    launcher, home = str(tmp_path / "bin/mpirun"), {"HOME": str(tmp_path / "home")}
    site, own = tmp_path / "etc", tmp_path / "home/.openmpi"
    assert commands.quick_start("mpich", launcher, home) == ""
    for folder, name in ((site, "openmpi-mca-params.conf"), (own, "mca-params.conf")):
        folder.mkdir(parents=True)
        (folder / name).write_text("# btl = tcp\nbtl_tcp_if_include = eth0\n")
        script = commands.quick_start("openmpi", launcher, home)
        (folder / name).write_text("  btl=self,tcp\n")
        assert commands.quick_start("openmpi", launcher, home) == ""
        (folder / name).unlink()
    for sizes, given, seen in (
        (("4", "4"), None, "^ofi"), (("2", "4"), None, None), (("4", "4"), "tcp", "tcp"),
        (("4", "4"), "", ""),
    ):  # fmt: skip
        told = dict(zip(("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), sizes, strict=True))
        told |= {} if given is None else {"OMPI_MCA_btl": given}
        words = ["/bin/sh", "-c", f"{script} exec env"]
        lines = subprocess.run(words, env=told, capture_output=True, text=True, check=True).stdout
        environ = dict(line.split("=", 1) for line in lines.splitlines())
        assert environ.get("OMPI_MCA_btl") == seen


def test_a_history_that_cannot_be_written(tmp_path, launcher, capsys):
    """A full disk: the job goes on without it, and is told how often it was."""
    control = tmp_path / "own"
    history = control / "history.jsonl"
    words = f"rm -f {history}; mkdir -p {history}; exit $((1 - MPIDIST_ATTEMPT))"
    job = attempts.LaunchedJob(("sh", "-c", words), 1, control, words=launcher)
    assert attempts.run(job) == 0
    said = capsys.readouterr().err
    assert said.count("the history is not written: ") == 4
    assert "attempt 1 on 1 ranks" in said


@pytest.mark.parametrize(
    ("version", "named"),
    [
        ("mpirun (Open MPI) 5.0.7", "mpirun of Open MPI 5.0.7"),
        ("mpirun (Open MPI) 4.1.6", "mpirun of Open MPI 4.1.6"),
        ("HYDRA build details:\n    Version: 4.2.0", "mpirun of MPICH"),
        ("something else 9", "mpirun"),
    ],
)
def test_launchers_under_which_nobody_survives(tmp_path, version, named):
    """Refused before anything starts; the text says what works."""
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\ncat <<END\n{version}\nEND\n")
    launcher.chmod(0o755)
    with pytest.raises(ConfigError) as error:
        commands.surviving([str(launcher), "-n", "2"])
    assert f"--elastic: {named} ends the job" in str(error.value)
    assert "The same command without --elastic works" in str(error.value)
    with pytest.raises(ConfigError, match="--elastic: srun ends the job"):
        commands.surviving(["srun", "-n", "2"])


def test_a_launcher_under_which_ranks_survive(tmp_path):
    launcher = tmp_path / "mpirun"
    launcher.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    launcher.chmod(0o755)
    words = [str(launcher), "--with-ft", "ulfm", "-n", "2"]
    assert commands.surviving([words[0], "-n", "2"]) == words
    assert commands.surviving(words) == words


def test_the_folder_for_copies_in_memory(tmp_path, launcher, monkeypatch, capfd):
    """The same one for all attempts; gone at the end; those of killed launchers are removed."""
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    stale, other, unnamed, old = (tmp_path / f"mpidist-copies-{k}" for k in range(4))
    for folder in (stale, other, unnamed, old):
        folder.mkdir()
        (folder / "state").touch()
    (stale / "owner").write_text(f"{os.uname().nodename} 999999999 1")
    (other / "owner").write_text("another-host 1 1")
    os.utime(old, times=(0, time.time() - 3700))  # of a launcher on another host; no rank lives
    words = "ls -ld $MPIDIST_MEMORY_FOLDER; exit $((1 - MPIDIST_ATTEMPT))"
    job = attempts.LaunchedJob(("sh", "-c", words), 1, tmp_path / "own", words=launcher)
    assert attempts.run(job) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first.startswith("drwx------")
    assert first.split()[-1] == second.split()[-1]
    assert sorted(tmp_path.glob("mpidist-copies-*")) == [other, unnamed]
    assert not job.folder.exists()
    # Killed and started again with the same control folder: its copies are used.
    job.folder.mkdir()
    mine = memory_folder.make_memory_folder(job.folder)
    (mine / "owner").write_text(f"{os.uname().nodename} 999999999 1")
    assert memory_folder.make_memory_folder(job.folder) == mine
    # Another one of another user, or no such file system: no copies.
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path / "none")
    assert memory_folder.make_memory_folder(job.folder) is None
    job = job._replace(program=("sh", "-c", 'echo "${MPIDIST_MEMORY_FOLDER-none}"'))
    assert attempts.run(job) == 0
    assert capfd.readouterr().out == "none\n"


@pytest.mark.parametrize("host", ["n1", "localhost", socket.gethostname()])
def test_the_copies_on_the_only_host_are_removed(tmp_path, monkeypatch, host):
    """It need not be this one; on this one, nothing is started for that."""
    asked = []
    monkeypatch.setattr(memory_folder, "run_on_hosts", lambda _, hosts, words: asked.extend(hosts))
    job = attempts.LaunchedJob(("x",), 2, tmp_path, ("mpirun",), {host: 2})
    copies = tmp_path / "copies"
    copies.mkdir()
    memory_folder.remove_memory_folder(job, copies, False, [host])
    assert not copies.exists()
    assert asked == ["n1"] * (host == "n1")
