"""The harness `many.py`: each case has its own result, and a failed case hides no other."""

import pytest

PROGRAM = """
import os, sys
import numpy as np
from mpi4py import MPI
import mpidist as md

comm, what = MPI.COMM_WORLD, sys.argv[1]
total = md.allreduce(comm, np.ones(1, np.int32))[0]
print(f"<{what} {total} {__name__}>", flush=True)
if what == "code":
    os.environ["CHANGED"] = "1"
    os.chdir("/")
    sys.exit(3)
elif what == "differ":
    sys.exit(comm.rank)
elif what == "raise":
    raise ValueError("of a case")
elif what == "config":
    raise md.ConfigError("bad input")
elif what == "fork":
    if not os.fork():
        sys.exit("the child")
    os.wait()
elif what == "clean":
    print(os.environ.get("CHANGED"), os.getcwd())
elif what == "die" and comm.rank == 1:
    os._exit(9)
comm.Barrier()
"""
CASES = ("clean", "code", "differ", "raise", "config", "fork", "help", "clean again")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("cases") / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def ends(many, program):
    cases = {name: [program, name.split()[0]] for name in CASES}
    return many(2, {**cases, "help": ["-m", "mpidist", "--help"]}, cwd=program.parent)


def test_each_case_has_its_own_end(ends, program):
    codes = {name: end.returncode for name, end in ends.items()}
    assert codes == {
        "clean": 0, "code": 3, "differ": (0, 1), "raise": 1, "config": 2, "fork": 0, "help": 0,
        "clean again": 0,
    }  # fmt: skip
    for name in set(CASES) - {"help"}:
        assert ends[name].stdout.count(f"<{name.split()[0]} 2 __main__>") == 2, name
    for name in ("clean", "clean again"):
        assert ends[name].stdout.count(f"None {program.parent}\n") == 2
        assert ends[name].stderr == ""
    assert ends["help"].ranks[1][0].startswith("usage: mpidist")
    assert ends["raise"].stderr.count("ValueError: of a case") == 2
    where = f"program.py:{1 + PROGRAM[: PROGRAM.index('raise md.C')].count(chr(10))}"
    assert ends["config"].stderr == f"mpidist: error: bad input ({where})\n" * 2
    assert ends["fork"].stderr == "the child\n" * 2
    with pytest.raises(RuntimeError, match=r"case 'raise' of 2 ranks: .*exited with 1"):
        ends["raise"].check()


def test_a_case_that_dies_is_named_and_those_behind_it_are_not_run(many, program):
    ends = many(2, {name: [program, name] for name in ("clean", "die", "fork")})
    assert ends["clean"].returncode == 0
    assert [ends[name].timed_out for name in ("die", "fork")] == [True, True]
    assert "ranks [0, 1] did not end; the job: " in ends["die"].stderr
    assert "held up by 'die'" in ends["fork"].stderr
    with pytest.raises(RuntimeError, match="case 'die' of 2 ranks"):
        ends["die"].check()
