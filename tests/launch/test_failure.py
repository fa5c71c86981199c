"""A rank that fails ends a job of plain ``python program.py`` at once, with only one traceback."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from again import best_of_three

from mpidist.launch.launchers import find_launcher, launch, launcher_kind

PROGRAM = """
import resource, sys, threading, time
import numpy as np
from mpi4py import MPI
from mpidist.runtime.failure import install_hook
from mpidist.errors import ConfigError, MismatchError, MpidistError, NoCheckpoint
import mpidist as md

comm = MPI.COMM_WORLD
install_hook(comm)
install_hook(comm)

def wait_for_all():
    comm.Allreduce(MPI.IN_PLACE, np.ones(1000))

def of_my_own():
    raise ValueError("deep trouble")

def out_of_memory():
    limit = 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    np.ones(1 << 30)

def in_a_thread():
    thread = threading.Thread(target=of_my_own)
    thread.start()
    thread.join()
    time.sleep(1000)

def everywhere():
    raise MismatchError("the ranks disagree:\\n  about much")

def late():  # the last rank has spoken when the others fail
    time.sleep(0.6 if comm.rank < comm.size - 1 else 0)
    of_my_own()

def config():
    raise ConfigError("algorithm='rnig': did you mean 'ring'?")

def node_once():
    with md.node_once(comm, ranks_per_node=2) as first:
        if comm.rank == comm.size - comm.size % 2 - 2:
            of_my_own()

def hook():
    sys.excepthook = lambda *a: print("user hook", a[0].__name__, file=sys.stderr)

x = np.ones(100_000)
comm.Allreduce(MPI.IN_PLACE, x)
segments = {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/" in line}
print("".join(f"<segment {path}>" for path in segments), flush=True)
comm.Barrier()
what, ranks = sys.argv[1], eval(sys.argv[2])
if comm.rank in ranks:
    {"raise": of_my_own, "late": late, "memory": out_of_memory, "thread": in_a_thread,
     "everywhere": everywhere, "config": config,
     "exit": lambda: sys.exit(3), "node_once": node_once, "none": lambda: None,
     "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    }[what]()
elif what != "node_once":
    wait_for_all()
if what == "none":
    wait_for_all()
"""

CONFIG = (
    "mpidist: error: algorithm='rnig': did you mean 'ring'? "
    f"(program.py:{1 + PROGRAM[: PROGRAM.index('raise ConfigError')].count(chr(10))})\n"
)


#: What runs: ranks, what happens, on which ranks.
EVERYWHERE = "range(9)"
RUNS = [
    (2, "raise", "[1]"), (4, "raise", "[1, 2]"), (4, "raise", EVERYWHERE), (1, "raise", EVERYWHERE),
    (4, "late", EVERYWHERE), (2, "memory", "[1]"), (2, "thread", "[1]"),
    (4, "everywhere", EVERYWHERE), (1, "config", EVERYWHERE),
    (4, "config", EVERYWHERE), (4, "node_once", EVERYWHERE), (4, "exit", "[2]"),
    (4, "exit", EVERYWHERE), (2, "interrupt", "[1]"), (1, "none", EVERYWHERE),
    (4, "none", EVERYWHERE),
]  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("abort") / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def command(program, n, what, ranks):
    return n, [sys.executable, program, what, ranks]


@pytest.fixture(scope="module")
def ends(program, launches):
    return launches({each: command(program, *each) for each in RUNS})


def run(ends, n, what, ranks=EVERYWHERE):
    """Return how it ended, after a look at what every end must be: by our doing."""
    return checked(ends[n, what, ranks])


def checked(result):
    # Nobody's wait in the program ends by itself before that.
    assert not result.timed_out, result.stderr
    # However it ended: the memory that the MPI library shared has no name any more.
    assert left_behind(result) == []
    return result


@pytest.fixture
def usually(ends, program):
    """Check how a run ended, and where other work has held up a rank of it, that of another."""

    def best(check, n, what, ranks=EVERYWHERE):
        def again():
            return checked(launch(*command(program, n, what, ranks), timeout=120))

        best_of_three(check, again, run(ends, n, what, ranks))

    return best


def left_behind(result):
    """Names of shared memory that the program had, and that are there without it."""
    segments = re.findall(r"<segment (/dev/shm/[^>]+)>", result.stdout)
    return [path for path in segments if Path(path).exists()]


def said(result, text):
    return result.stderr.count(text)


@pytest.mark.parametrize(
    ("n", "what", "ranks"),
    [(2, "raise", "[1]"), (4, "raise", "[1, 2]"), (4, "raise", EVERYWHERE),
     (4, "late", EVERYWHERE)],
)  # fmt: skip
def test_one_traceback_and_the_job_is_over(ends, n, what, ranks):
    """R97: rank, host and traceback, once; nobody hangs in a collective."""
    result = run(ends, n, what, ranks)
    assert result.returncode == 1
    assert said(result, "Traceback (most recent call last)") == 1
    assert said(result, "ValueError: deep trouble") == 1
    (speaker,) = re.findall(rf"mpidist: rank (\d) of {n} on ", result.stderr)
    assert int(speaker) in eval(ranks)


@pytest.mark.parametrize(("ranks", "lowest"), [("[1, 2]", 1), (EVERYWHERE, 0)])
def test_some_fail_alike_and_the_lowest_speaks(usually, ranks, lowest):
    def check(result):
        assert said(result, f"mpidist: rank {lowest} of 4 on ") == 1

    usually(check, 4, "raise", ranks)


def test_a_rank_without_memory(ends):
    """It may not even have enough of it to say much, but the job ends."""
    result = run(ends, 2, "memory", "[1]")
    assert result.returncode == 1
    assert said(result, "mpidist: rank 1 of 2 on ") == 1
    assert said(result, "MemoryError") == 1


def test_a_thread_s_exception_counts(ends):
    result = run(ends, 2, "thread", "[1]")
    assert result.returncode == 1
    assert said(result, "ValueError: deep trouble") == 1


def test_raised_everywhere_is_one_line(ends):
    result = run(ends, 4, "everywhere")
    assert result.returncode == 1
    where = f"program.py:{1 + PROGRAM[: PROGRAM.index('raise MismatchError')].count(chr(10))}"
    assert said(result, f"mpidist: error: the ranks disagree: about much ({where})\n") == 1
    assert said(result, "Traceback") == 0


@pytest.mark.parametrize("n", [1, 4])
def test_bad_input_is_one_line_and_exit_code_2(ends, n):
    result = run(ends, n, "config")
    assert result.returncode == 2
    assert said(result, CONFIG) == 1
    assert said(result, "Traceback") == 0


def test_bad_input_without_a_launcher(program):
    command = [sys.executable, program, "config", "[0]"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == CONFIG
    assert left_behind(result) == []


def test_an_ordinary_end_without_a_launcher(program):
    """Open MPI alone would leave its shared memory behind."""
    command = [sys.executable, program, "none", "[0]"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert left_behind(result) == []


def test_one_rank_keeps_python_s_own_traceback(ends):
    result = run(ends, 1, "raise")
    assert result.returncode == 1
    assert said(result, "Traceback (most recent call last)") == 1
    assert said(result, "mpidist:") == 0


def test_the_leader_with_the_cause_speaks_first(usually):
    """R144: ranks 0 and 1 know of rank 2's failure only by hearsay, and keep silent."""

    def check(result):
        assert result.returncode == 1
        assert said(result, "mpidist: rank 2 of 4 on ") == 1
        assert said(result, "ValueError: deep trouble") == 1
        assert said(result, "mpidist: error") == 0

    usually(check, 4, "node_once")


def test_sys_exit_of_one_rank_alone(ends):
    result = run(ends, 4, "exit", "[2]")
    assert result.returncode == 3
    assert said(result, "mpidist: rank 2 of 4 on ") == 1
    assert said(result, "called sys.exit(3)") == 1


def test_sys_exit_of_all_is_an_ordinary_end(ends):
    result = run(ends, 4, "exit")
    assert result.returncode == 3
    assert said(result, "mpidist:") == 0


SEVERAL_HOSTS = """
import atexit, sys
from pathlib import Path
from mpi4py import MPI
comm = MPI.COMM_WORLD
atexit.register(lambda: Path(sys.argv[1], str(rank)).touch())
rank = comm.rank
from mpidist.fault_tolerance.guard import Stopped
from mpidist.runtime.failure import install_hook
install_hook(comm)
if rank:
    if sys.argv[2] == "exit":
        sys.exit(75)
    raise Stopped(1, "asked")
"""


@pytest.mark.parametrize("what", ["exit", "stop"])
def test_on_several_hosts_one_rank_fails_first(tmp_path, what):
    """Open MPI's mpirun may hang for ever when all of its hosts tell it of a failure at once.

    It ends the ranks that wait, before they come to what a program had registered to run last.
    """
    program = tmp_path / "program.py"
    program.write_text(SEVERAL_HOSTS)
    told = ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", sys.executable, program, tmp_path, what]
    assert launch(4, told, timeout=60).returncode == 75
    came_to_it = {path.name for path in tmp_path.glob("[0-9]")}
    if launcher_kind(find_launcher())[0] == "openmpi":
        assert came_to_it == {"0", "1"}
    else:
        assert came_to_it >= {"0"}  # that of MPICH does not hang, and no rank waits


def test_interrupted_rank(ends):
    result = run(ends, 2, "interrupt", "[1]")
    assert result.returncode == 130
    assert said(result, "\nKeyboardInterrupt\n") == 1


@pytest.mark.parametrize("n", [1, 4])
def test_nothing_happens_when_all_is_well(ends, n):
    result = run(ends, n, "none")
    assert (result.returncode, result.stderr) == (0, "")


SUBGROUP_FIRST = """
import numpy as np
from mpi4py import MPI
import mpidist as md

world = MPI.COMM_WORLD
some = world.Split(0 if world.rank < 2 else MPI.UNDEFINED)
if some != MPI.COMM_NULL:
    md.allreduce(some, np.ones(4))
md.allreduce(world, np.ones(4))
print("through", world.rank, flush=True)
"""


def test_ranks_that_began_with_different_communicators_leave_together(tmp_path):
    """What runs at exit runs in one order on all ranks, whoever met a communicator first."""
    program = tmp_path / "program.py"
    program.write_text(SUBGROUP_FIRST)
    result = launch(4, [sys.executable, program], timeout=60).check()
    # Lines of different ranks may run into each other.
    assert sorted(re.findall(r"\d", result.stdout)) == ["0", "1", "2", "3"]
