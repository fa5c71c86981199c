"""The command line: errors for bad input, help texts, and commands that work on a login node."""

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import play_commands
from digits_job import write_job

from mpidist.launch.launchers import launch, launch_environment

MPIDIST = [sys.executable, "-m", "mpidist"]
BAD_CALL = str(Path(__file__).with_name("programs") / "bad_call.py")

#: Python runs this at its start: whoever imports the blocked module ends, and says so.
GUARD = """
import os, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["BLOCKED"]:
            print("blocked import of", name, file=sys.stderr)
            os._exit(99)
sys.meta_path.insert(0, Blocked())
"""

#: What is wrong, as words for `mpidist train`, and what the one line must say.
BEFORE_MPI = {
    "algorithm": (
        ["job.toml", "--set", "strategy.algorithm=rnig"],
        ["'rnig'", "one of auto, native, ring, tree", "did you mean 'ring'?"],
    ),
    "unknown key": (["job.toml", "--set", "epohcs=3"], ["'epohcs'", "did you mean 'epochs'?"]),
    "unknown setting": (["job.toml", "--set", "optimizer.lrr=3"], ["'lrr'", "mean 'lr'?"]),
    "no job file": (["jbo.toml"], ["cannot read the job jbo.toml: No such file", "give the path"]),
    "no data file": (
        ["job.toml", "--set", 'data={name="idx", images_path="a", labels_path="b"}'],
        ["no such file: a"],
    ),
    "truncated data": (
        ["job.toml", "--set", 'data={name="idx", images_path="cut", labels_path="b"}'],
        ["cut: truncated: 100 bytes, expected 7856 for (10, 28, 28)"],
    ),
    "staleness": (
        ["job.toml", "--set", 'strategy={name="parameter_server", consistency="ssp"}',
         "--set", "strategy.staleness=-1"],
        ["staleness is -1", ">= 0"],
    ),
    "nothing to resume": (["job.toml", "--resume"], ["no checkpoint in run/checkpoints"]),
    "seed": (["job.toml", "--set", "seed=-1"], ["seed=-1; expected 0 or more"]),
    "no path": (["job.toml", "--set", "out=3"], ["out=3; expected the path"]),
    "wrong shape": (["job.toml", "--set", "model.sizes=[63, 10]"], ["expected (n, 63)"]),
}  # fmt: skip

#: Wrong only for so many ranks, which the launcher tells before MPI starts.
AT_FOUR_RANKS = {
    "servers": (
        ["job.toml", "--set", 'strategy={name="parameter_server", servers=4}'],
        ["4 servers leave 0 workers; use at most 3"],
    ),
    "batch": (
        ["job.toml", "--set", "global_batch=3"],
        ["global_batch=3 is smaller than the 4 workers"],
    ),
}


def filled(folder):
    write_job(folder, steps=4)
    header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (10, 28, 28))
    (folder / "cut").write_bytes(header.ljust(100, b"\0"))
    (folder / "sitecustomize.py").write_text(GUARD)
    return folder


@pytest.fixture
def folder(tmp_path):
    return filled(tmp_path)


def blocking(folder, module):
    """The environment in which nobody can import `module`."""
    return {"PYTHONPATH": str(folder), "BLOCKED": module}


def alone(folder, args, module="mpi4py.MPI"):
    """Run without a launcher, and without a module."""
    env = {**launch_environment(), **blocking(folder, module)}
    return subprocess.run(
        [*MPIDIST, *args], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )


def told_once(result, words, code=2):
    """Check for one line of ours in all that was printed, and return it."""
    said = result.stdout + result.stderr
    assert result.returncode == code, said
    assert "Traceback" not in said
    assert "blocked import" not in said
    lines = [line for line in said.splitlines() if line.startswith("mpidist: ")]
    assert len(lines) == 1, said
    assert lines[0].startswith("mpidist: error: ")
    assert [word for word in words if word not in lines[0]] == [], lines[0]
    return lines[0]


@pytest.fixture(scope="module")
def before_mpi(tmp_path_factory):
    """What becomes of each; of the first, in a process of its own."""
    folder = filled(tmp_path_factory.mktemp("before"))
    words = {case: ["train", *args] for case, (args, _) in BEFORE_MPI.items()}
    first, *_ = words
    ends = play_commands(words, folder / "reports", cwd=folder)
    return {**ends, first: alone(folder, words[first])}


@pytest.mark.parametrize("case", BEFORE_MPI)
def test_bad_input_without_a_launcher(before_mpi, case):
    """R97: one line, exit code 2, and MPI was not even imported."""
    result = before_mpi[case]
    assert result.stderr == told_once(result, BEFORE_MPI[case][1]) + "\n"
    assert result.stdout == ""


FOUR_RANKS = {
    **AT_FOUR_RANKS,
    **{
        case: BEFORE_MPI[case]
        for case in ("algorithm", "no job file", "truncated data", "nothing to resume")
    },
}


#: What each host may see in another way, and what is the same everywhere: before MPI has begun,
#: as the ranks of a job of their own. The others are told where it has begun.
BEGINNING = ("no job file", "servers")


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory, launches, many):
    folder = filled(tmp_path_factory.mktemp("four"))
    words = {case: ["-m", "mpidist", "train", *args] for case, (args, _) in FOUR_RANKS.items()}
    jobs = {case: (4, [sys.executable, *words.pop(case)]) for case in BEGINNING}
    return {**many(4, words, cwd=folder), **launches(jobs, cwd=folder)}


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_bad_input_on_four_ranks(on_four_ranks, case):
    """R97: one line for the whole job, from rank 0."""
    told_once(on_four_ranks[case], FOUR_RANKS[case][1])


@pytest.mark.parametrize(("rank", "words"), [(0, []), (1, [f"rank 1 on {socket.gethostname()}: "])])
def test_bad_input_on_one_host_alone(folder, rank, words):
    """R97: the others would wait in MPI_Init for ever, or be ended without a word."""
    lacks = f'[ "$OMPI_COMM_WORLD_RANK$PMI_RANK" = {rank} ] && cd /; exec "$@"'
    command = ["sh", "-c", lacks, "sh", *MPIDIST, "train", "job.toml"]
    told_once(launch(2, command, cwd=folder), [*words, "cannot read the job job.toml: No such"])


def test_checkpoint_of_another_model(folder, launches):
    """What differs is named, whoever reads it; nothing was written."""
    launch(2, [*MPIDIST, "train", "job.toml"], cwd=folder).check()
    before = sorted((folder / "run" / "checkpoints").iterdir())
    args = ["train", "job.toml", "--resume", "--set", "model.sizes=[[1, 8, 8], 20, 10]"]
    ends = launches({ranks: (ranks, [*MPIDIST, *args]) for ranks in (1, 4)}, cwd=folder)
    for result in ends.values():
        said = result.stdout + result.stderr
        lines = [line for line in said.splitlines() if line.startswith("mpidist: error: ")]
        assert (result.returncode, len(lines)) == (2, 1), said
        assert "Traceback" not in said
        assert "is of another model: " in lines[0]
        assert "(64, 20)" in lines[0]
        assert "(64, 16)" in lines[0]
    assert sorted((folder / "run" / "checkpoints").iterdir()) == before


#: Which call of the program, on how many ranks, and what the line must say.
BAD_CALLS = [
    ("integer_mean", 1, ["mean", "int64"]),
    ("integer_mean", 3, ["mean", "int64"]),
    ("read_only", 3, ["read-only"]),
    ("rnig", 3, ["did you mean 'ring'?"]),
    ("closed_client", 2, ["is closed; it was used after close()"]),
    ("closed_client", 3, ["is closed; it was used after close()"]),
    ("closed_store", 1, ["store of", "is closed"]),
    ("closed_store", 3, ["store of", "is closed"]),
]


#: Whose ranks end the job as a user's would; of the others each rank has its line for itself.
ENDING = [("integer_mean", 3), ("closed_client", 2), ("closed_client", 3)]


@pytest.fixture(scope="module")
def bad_calls(tmp_path_factory, launches, many):
    folder = tmp_path_factory.mktemp("calls")
    words = {(call, n): [BAD_CALL, call, folder / f"store-{n}"] for call, n, _ in BAD_CALLS}
    jobs = {each: (each[1], [sys.executable, *words.pop(each)]) for each in ENDING}
    ends = launches(jobs)
    for ranks in (1, 3):
        cases = {each: words[each] for each in words if each[1] == ranks}
        for each, end in many(ranks, cases).items():
            assert {err for _, err in end.ranks} == {end.ranks[0][1]}, "all ranks say the same"
            ends[each] = replace(end, stderr=end.ranks[0][1])
    return ends


@pytest.mark.parametrize(("call", "n", "words"), BAD_CALLS)
def test_bad_calls_in_a_program(bad_calls, call, n, words):
    """R97: the same for a user's own program under plain python, with the line of that call."""
    program = Path(BAD_CALL).read_text().splitlines()
    line = told_once(bad_calls[call, n], words)
    assert line.endswith(")")
    file, _, number = line[:-1].rpartition("(")[2].partition(":")
    assert file == "bad_call.py"
    # The line that is wrong lies in the function that was asked for, before any other.
    above = "\n".join(program[: int(number)])
    assert above.rpartition("\ndef ")[2].startswith(f"{call}(")


#: What needs no MPI: the words, the exit code, and what is printed.
LOGIN_NODE = [
    (["--help"], 0, "usage: mpidist", ""),
    (["--version"], 0, "mpidist 0.1.0\n", ""),
    (["train", "--help"], 0, "JOB.toml", ""),
    ([], 2, "COMMAND", ""),
    (["trian"], 2, "", "unknown command 'trian'; expected one of train, bench"),
    (["train"], 2, "", "JOB.toml"),
    (["train", "job.toml", "--bogus"], 2, "", "unrecognized arguments: --bogus"),
    (["train", "job.toml", "--set", "a"], 2, "", "expected KEY=VALUE"),
    (["checkpoint", "list", "store"], 0, "           7  ", ""),
    (["checkpoint", "show", "store"], 0, "w      <f4        (2, 3)", ""),
    (["checkpoint", "show", "nowhere"], 2, "", "nowhere"),
    (["simulate", "allreduce", "--ranks", "3"], 0, "ring, 3 ranks", ""),
]


@pytest.fixture(scope="module")
def on_a_login_node(tmp_path_factory, store):
    """What becomes of each; of --version and of a command, in processes of their own."""
    folder = filled(tmp_path_factory.mktemp("login-node"))
    words = {
        " ".join(args): [str(store) if word == "store" else word for word in args]
        for args, *_ in LOGIN_NODE
    }
    ends = play_commands(words, folder / "reports", cwd=folder, without="mpi4py")
    for name in ("--version", "checkpoint show store"):
        ends[name] = alone(folder, words[name], module="mpi4py")
    return ends


@pytest.mark.parametrize(("args", "code", "out", "err"), LOGIN_NODE)
def test_login_node(on_a_login_node, args, code, out, err):
    """R95: what needs no MPI works where mpi4py cannot even be imported."""
    result = on_a_login_node[" ".join(args)]
    assert result.returncode == code, result.stderr
    assert out in result.stdout
    assert err in result.stderr
    if err:
        told_once(result, [err])
    else:
        assert result.stderr == ""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A checkpoint from one rank, written in a process of its own."""
    path = tmp_path_factory.mktemp("login") / "store"
    program = (
        "import sys, numpy as np\nfrom mpi4py import MPI\nimport mpidist as md\n"
        "with md.CheckpointStore(MPI.COMM_SELF, sys.argv[1]) as store:\n"
        "    store.save(7, {'w': np.ones((2, 3), 'f4')})\n"
    )
    launch(1, [sys.executable, "-c", program, str(path)]).check()
    return path
