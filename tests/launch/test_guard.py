"""After a signal, a time limit or a bad loss, all ranks stop at one step, save, and exit."""

import json
import re
import signal
import sys

import pytest
from tiers import exhaustive
from until import wait_until

from mpidist.launch.launchers import start
from mpidist.launch.processes import signal_all

PROGRAM = """
import json, os, signal, sys, time
import numpy as np
from mpi4py import MPI
import mpidist as md
from mpidist.fault_tolerance.guard import Stopped

what, folder = sys.argv[1], sys.argv[2]
comm = MPI.COMM_WORLD

class Store:
    def save(self, step, state):
        with open(f"{folder}/rank-{comm.rank}.json", "w") as file:
            json.dump({"step": step, "w": state["w"].tolist()}, file)

state = {"w": np.zeros(3)}
before = signal.getsignal(signal.SIGTERM)

def loop(run, ranks, steps=3000):
    for step in range(steps):
        loss = np.array([1.0])
        if what == "nan" and step == 7 and comm.rank == 1:
            loss[:] = np.nan
        if what == "poisoned" and step == 7:
            loss[:] = np.inf
            state["w"][1] = np.nan if comm.rank == 1 else 1.0
        ranks.Allreduce(MPI.IN_PLACE, loss)
        run.check_loss(loss[0], step)
        if what in ("code", "caught") and step == 5 and comm.rank == 1:
            run.stop("enough")
        if what == "apart" and step == 4 and ranks.rank == 1:
            step += 1
        if what == "piggyback":
            flags = np.array([run.flag], "i4")
            ranks.Allreduce(MPI.IN_PLACE, flags)
            stop = run.heard(flags[0])
        else:
            stop = run.should_stop(step)
        if stop:
            run.leave(step)
        state["w"] += 1
        if step == 3 and ranks.rank == 0:
            print("under way", flush=True)
        time.sleep(0.01)

print(f"<pid {comm.rank} {os.getpid()}>", flush=True)
options = {"time_limit": 0.5} if what == "limit" else {}
workers = MPI.COMM_NULL
if what in ("servers", "servers-finish"):
    # The last rank is a server: it is outside the loop and leaves when the workers have left.
    color = 0 if comm.rank < comm.size - 1 else MPI.UNDEFINED
    workers = options["deciders"] = comm.Split(color)
try:
    with md.guard(comm, state, Store(), **options) as run:
        if workers == MPI.COMM_NULL and "deciders" in options:
            print("serving", flush=True)
        else:
            loop(run, workers if "deciders" in options else comm,
                 5 if what in ("finish", "servers-finish") else 3000)
except Stopped as stop:
    assert signal.getsignal(signal.SIGTERM) == before
    print(f"rank {comm.rank} stopped at {stop.step}: {stop.reason}", flush=True)
    if what != "caught":
        raise
    began = time.monotonic()
    time.sleep(2 * comm.rank)
    md.free(comm)
    print(f"rank {comm.rank} has waited: {time.monotonic() - began > 1.8}")
    sys.exit(0)
assert run.exit_code == 0
assert signal.getsignal(signal.SIGTERM) == before
print(f"rank {comm.rank} finished", flush=True)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("guard") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def saved(folder, n):
    """Read what each rank saved, check that all saved the same, and return it."""
    states = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(n)]
    assert all(state == states[0] for state in states), states
    return states[0]


def run_and_signal(program, n, what, folder, number, ranks):
    """Start the program, send a signal to some ranks when it is under way, wait for its end."""
    job = start(n, [sys.executable, program, what, str(folder)])
    try:
        # What the launcher passes on of one rank may come later than what it has of another.
        wait_until(lambda: "under way" in job.output(), 150, otherwise=job.output, job=job.process)
        # Not by lines: the launcher may mix the ranks' output in the midst of one.
        found = r"<pid (\d+) (\d+)>"
        wait_until(lambda: len(re.findall(found, job.output())) == n, otherwise=job.output)
        pids = dict(re.findall(found, job.output()))
        signal_all([int(pids[str(rank)]) for rank in ranks], number)
    finally:
        result = job.finish(timeout=150)
    assert not result.timed_out, result.stderr
    return result


#: What runs, the signal, and the ranks that get it.
SIGNALS = {
    "one rank": ("loop", signal.SIGTERM, [2]),
    "all ranks": ("loop", signal.SIGUSR1, [0, 1, 2]),
    "in a reduction": ("piggyback", signal.SIGTERM, [1]),
    "beside a server": ("servers", signal.SIGTERM, [1]),
}


@pytest.fixture(scope="module")
def scenes(program):
    def play(what, number, ranks):
        return lambda folder: run_and_signal(program, 3, what, folder, number, ranks)

    return {name: play(*each) for name, each in SIGNALS.items()}


@pytest.mark.parametrize(
    ("scene", "name"),
    [("one rank", "one rank"), exhaustive("all ranks", "all ranks"),
     ("in a reduction", "in a reduction")],
    indirect=["scene"],
)  # fmt: skip
def test_signal_stops_all_ranks_at_one_step(scene, name):
    """R47: any rank's signal; all save the same step, and leave with the code for requeueing."""
    result, folder = scene
    what, number, _ = SIGNALS[name]
    assert result.returncode == 75, result.stderr
    state = saved(folder, 3)
    # The step that is saved is the one the weights belong to: no step is lost or done twice.
    assert state["w"] == [state["step"]] * 3
    assert result.stdout.count(f"stopped at {state['step']}: ") == 3
    if what == "loop":
        assert result.stdout.count(f"{number.name} on rank ") == 3
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("scene", ["beside a server"], indirect=True)
def test_servers_leave_with_the_workers(scene):
    """A signal that only a worker got ends the server as well, with the same code and reason."""
    result, folder = scene
    assert result.returncode == 75, result.stderr
    step = saved(folder, 2)["step"]
    assert result.stdout.count(f"stopped at {step}: SIGTERM on rank 1") == 3
    assert not (folder / "rank-2.json").exists()


#: What happens without a signal from outside, and the ranks of it.
UNDISTURBED = {
    "limit": 2, "code": 2, "caught": 2, "finish": 3, "servers-finish": 3, "nan": 2, "poisoned": 2,
    "apart": 2,
}  # fmt: skip

#: What ends the job with an error.
ENDING = ("nan", "poisoned", "apart")


@pytest.fixture(scope="module")
def ends(program, launches, many, tmp_path_factory):
    """By what happens: what came of it, and the folder with what the ranks saved."""
    folders = {what: tmp_path_factory.mktemp(what) for what in UNDISTURBED}
    words = {what: [program, what, folders[what]] for what in UNDISTURBED}
    jobs = {what: (2, [sys.executable, *words.pop(what)]) for what in ENDING}
    results = launches(jobs)
    for ranks in (2, 3):
        results.update(many(ranks, {w: words[w] for w in words if UNDISTURBED[w] == ranks}))
    return {what: (result, folders[what]) for what, result in results.items()}


@pytest.mark.parametrize(
    ("what", "reason"), [("limit", "time limit of 0.5 s"), ("code", "requested on rank 1")]
)
def test_other_reasons_to_stop(ends, what, reason):
    result, folder = ends[what]
    assert result.returncode == 75, result.stderr
    step = saved(folder, 2)["step"]
    assert step == 5 or what == "limit"
    assert result.stdout.count(f"stopped at {step}: {reason}") == 2


def test_a_program_that_catches_it_goes_on(ends):
    """Its ranks wait for each other in `md.free`, as in a program without a guard."""
    result, _ = ends["caught"]
    assert sorted(re.findall(r"rank \d has waited: True", result.check().stdout)) == [
        f"rank {rank} has waited: True" for rank in range(2)
    ]


@pytest.mark.parametrize("what", ["finish", "servers-finish"])
def test_an_undisturbed_run_ends_as_ever(ends, what):
    result, folder = ends[what]
    assert result.check().stdout.count("finished") == 3
    assert result.stderr == ""
    assert list(folder.iterdir()) == []


def test_bad_loss_saves_the_state_before_the_step(ends):
    """R141: a NaN on one rank is in the reduced loss, so all stop alike and tell it once."""
    result, folder = ends["nan"]
    assert result.returncode == 1
    assert saved(folder, 2) == {"step": 7, "w": [7.0] * 3}
    assert result.stderr.count("mpidist: error: step 7: the loss is nan") == 1
    assert "Traceback" not in result.stderr


def test_a_poisoned_state_is_not_saved(ends):
    """R141: one rank's NaN is enough, or the newest checkpoint would be the useless one."""
    result, folder = ends["poisoned"]
    assert result.returncode == 1
    assert list(folder.iterdir()) == []
    assert result.stderr.count("holds NaN or infinity already") == 1


def test_ranks_at_different_steps_are_told(ends):
    result, _ = ends["apart"]
    assert result.returncode == 1
    assert "guard: should_stop: step differs: " in result.stderr
