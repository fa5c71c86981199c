"""If ranks make different calls, all ranks raise MismatchError within 5 s (DESIGN, R97)."""

import re
import sys
from pathlib import Path

import pytest
from again import best_of_three
from tiers import exhaustive

from mpidist.launch.launchers import launch

PROGRAM = Path(__file__).parent / "programs" / "mismatch.py"

CASES = {
    "dtype": (["auto", "native", "ring"], "rank 2 float64 .*ranks 0,1,3 float32"),
    "dtype_cached": (["auto", "native", "ring"], "rank 2 float64 .*ranks 0,1,3 float32"),
    "count": (["auto", "ring"], r"rank 2 shape \(20\) .*ranks 0,1,3 shape \(10\)"),
    "count_cached": (["auto", "native", "tree"], r"rank 2 shape \(300000\) .*ranks 0,1,3"),
    "order": (["native", "ring"], r"rank 2 shape \(20\) .*ranks 0,1,3 shape \(10\)"),
    "op": (["auto"], "rank 2 .*max.*ranks 0,1,3 .*sum"),
    "kind": (["auto", "ring"], "rank 2 broadcast .*ranks 0,1,3 allreduce"),
    "algorithm": (["auto"], "rank 2 algorithm=ring .*ranks 0,1,3 algorithm=tree"),
    "nonblocking": (["auto"], r"rank 2 shape \(4001\) .*ranks 0,1,3 shape \(4000\)"),
}


WORDS = [f"{case}:{name}" for case, (names, _) in CASES.items() for name in names]

#: Those of `make test`: each case, and each algorithm.
FIRST = ["dtype:auto", "dtype_cached:native", "count:ring", "count_cached:tree", "order:native",
         "op:auto", "kind:ring", "algorithm:auto", "nonblocking:auto"]  # fmt: skip


def command(words):
    return 4, [sys.executable, PROGRAM, *words]


def read(words, result):
    """{case: [(rank, seconds, message)]}, and all that was said."""
    # Not by lines: MPICH's launcher may put two ranks' output into one.
    told = r"<(\w+:\w+)> rank (\d) after ([0-9.]+) s: (.*?)(?=<\w+:\w+> rank|$)"
    lines = {word: [] for word in words}
    for word, rank, seconds, text in re.findall(told, result.stdout, re.MULTILINE):
        lines[word].append((int(rank), float(seconds), text))
    return lines, result.stdout + result.stderr


def alone(word):
    return read([word], launch(*command([word]), timeout=200))


def told(word, found, ranks, check):
    """Look at what each rank told of a case: all of `ranks` whatever happens, and all of `check`.

    Other work on the machine may hold up a run, or a rank until the others speak without it.
    """

    def everybody(found):
        lines, said = found
        assert sorted(rank for rank, _, _ in lines[word]) == ranks, said
        return [(seconds, text) for _, seconds, text in lines[word]]

    def in_time(told):
        assert all(seconds < 5 for seconds, _ in told), told
        for _, text in told:
            check(text)

    best_of_three(in_time, lambda: everybody(alone(word)), everybody(found))


@pytest.fixture(scope="module")
def all_cases(launches, chosen):
    """By case what came of it. A process goes on with other communicators after a mismatch."""
    words = chosen("test_all_ranks_raise", "word")
    number = -(-len(words) // 6)  # not more than six in one job
    parts = [words[first::number] for first in range(number)]
    ends = launches({part[0]: command(part) for part in parts}, timeout=200)
    return {word: read(part, ends[part[0]]) for part in parts for word in part}


@pytest.mark.parametrize("word", [word if word in FIRST else exhaustive(word) for word in WORDS])
def test_all_ranks_raise(all_cases, word):
    def check(text):
        assert re.search(CASES[word.partition(":")[0]][1], text), text
        assert re.search(r"#\d+", text), text
        assert "mismatch.py:" in text

    told(word, all_cases[word], [0, 1, 2, 3], check)


def test_a_rank_that_left_is_named():
    def check(text):
        assert "rank 2 left after" in text

    told("left:auto", alone("left:auto"), [0, 1, 3], check)


def test_uncaught_it_ends_the_job_in_one_line(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import numpy as np\nfrom mpi4py import MPI\nimport mpidist as md\n"
        "comm = MPI.COMM_WORLD\n"
        "md.allreduce(comm, np.ones(4, 'f8' if comm.rank == 2 else 'f4'))\n"
    )
    result = launch(4, [sys.executable, program], timeout=120)
    assert result.returncode != 0
    assert not result.timed_out
    ours = [line for line in result.stderr.splitlines() if line.startswith("mpidist: error")]
    assert len(ours) == 1, result.stderr
    assert "rank 2 float64" in ours[0]
    assert "train.py:5" in ours[0]
    assert "Traceback" not in result.stderr
