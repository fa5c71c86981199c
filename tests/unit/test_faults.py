"""The fault injector makes exactly the requested faults, at the requested place and time."""

import errno
import os
import subprocess
import sys
import time
import timeit

import pytest

from mpidist.checkpoint.storage import files
from mpidist.errors import ConfigError
from mpidist.launch import fault_points, faults
from mpidist.launch.faults import Fault, Injector, parse

TESTING = {"MPIDIST_TESTING": "1"}


@pytest.fixture
def armed(monkeypatch):
    """Arm this process with faults, for one test."""

    def arm(text, rank=0, attempt=0):
        monkeypatch.setattr(fault_points, "_act", Injector(parse(text, 4), rank, attempt))

    return arm


def test_what_can_be_ordered():
    one, two = parse("kill@step:20,rank=1; sleep@exchange,ms=50,attempt=any")
    assert one == Fault("kill", "step", number=20, rank=1)
    assert two == Fault("sleep", "exchange", ms=50, attempt=None)
    drawn = {parse(f"kill@step:1,rank=random,seed={seed}", 4)[0].rank for seed in range(40)}
    assert drawn == {0, 1, 2, 3}
    assert parse("kill@a,rank=random,seed=7", 4) == parse("kill@a,rank=random,seed=7", 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [("kil@step", "did you mean 'kill'"), ("kill", "expected ACTION@POINT"),
     ("kill@step:x", "number='x'"), ("kill@step,who=1", "unknown key 'who'"),
     ("kill@step,rank=-1", "rank='-1'")],
)  # fmt: skip
def test_what_cannot_be_ordered(text, said):
    with pytest.raises(ConfigError, match="MPIDIST_FAULT") as caught:
        parse(text)
    assert said in str(caught.value)


def test_refused_outside_tests():
    """A variable that was left behind must not break a run in earnest without a word."""
    with pytest.raises(ConfigError, match="set MPIDIST_TESTING=1"):
        faults.read_faults({"MPIDIST_FAULT": "kill@step"})
    assert faults.read_faults({"MPIDIST_FAULT": "kill@step", **TESTING}).faults


def test_nothing_is_loaded_unless_asked_for():
    """Without the variable a point is one test of None, and no code of tests is there."""
    code = (
        "import sys; from mpidist.launch import fault_points as p; p.fault_point('a', 1, file=3);"
        "assert p._act is None; assert 'mpidist.launch.faults' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    seconds = timeit.repeat(lambda: fault_points.fault_point("step", 1), number=10_000, repeat=5)
    assert min(seconds) < 0.1  # 10 us each, on a machine with other work


def test_rank_number_and_attempt(armed):
    armed("raise@here:3,rank=1", rank=1)
    fault_points.fault_point("here")
    fault_points.fault_point("there", 3)
    fault_points.fault_point("here")
    with pytest.raises(RuntimeError, match="fault at here:3 on rank 1"):
        fault_points.fault_point("here")
    fault_points.fault_point("here")
    for rank, attempt in ((0, 0), (1, 1)):
        armed("raise@here,rank=1", rank, attempt)
        fault_points.fault_point("here")
    armed("raise@here,attempt=any", 2, 5)
    with pytest.raises(RuntimeError):
        fault_points.fault_point("here")


def test_a_step_is_named_by_its_number(armed):
    """After a resume a run does not begin at step 1."""
    armed("raise@step:20")
    fault_points.fault_point("step", 19)
    with pytest.raises(RuntimeError):
        fault_points.fault_point("step", 20)


def test_sleep_and_no_space(armed):
    armed("sleep@slow,ms=60; enospc@full")
    start = time.perf_counter()
    fault_points.fault_point("slow")
    fault_points.fault_point("slow")
    assert time.perf_counter() - start >= 0.12
    with pytest.raises(OSError) as caught:
        fault_points.fault_point("full")
    assert caught.value.errno == errno.ENOSPC


def test_damaged_files(armed, tmp_path):
    path = tmp_path / "file"
    armed("flip@flip,seed=5; truncate@cut")
    path.write_bytes(bytes(100))
    fault_points.fault_point("flip", file=path)
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    descriptor = os.open(path, os.O_RDWR)
    fault_points.fault_point("cut", file=descriptor)
    os.close(descriptor)
    assert path.stat().st_size == 50
    with pytest.raises(ConfigError, match="no file at this point"):
        fault_points.fault_point("cut")


def test_file_calls_of_the_store(armed, monkeypatch, tmp_path):
    """Every call through which a checkpoint is written is a point, and only while asked for."""
    for change in files.CHANGES:
        monkeypatch.setattr(files, change, getattr(files, change))
    armed("enospc@file.write_at:2; truncate@file.sync")
    with files.folder(str(tmp_path)) as folder:
        descriptor = files.create("a", folder)
        files.write_at(descriptor, b"12345678", 0)
        with pytest.raises(OSError, match="fault"):
            files.write_at(descriptor, b"1", 8)
        files.sync(descriptor)
        files.sync(folder)
        os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == b"1234"


@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("exit", 3), ("stop", None)])
def test_the_end_of_a_process(action, code):
    program = "from mpidist.launch.fault_points import fault_point as p; p('end'); print('went on')"
    environment = {**os.environ, **TESTING, "MPIDIST_FAULT": f"{action}@end,code=3"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        if code is None:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            process.kill()
        out, err = process.communicate(timeout=60)
    assert out == ""
    assert f"mpidist: fault: {action} at end:1 on rank 0" in err
    assert code is None or process.returncode == code
