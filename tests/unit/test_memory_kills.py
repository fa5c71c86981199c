"""Find by control groups which rank the kernel killed for lack of memory, with faked files."""

import pytest

from mpidist.launch.control_groups import group_of, peak_memory
from mpidist.launch.heartbeat import Sign
from mpidist.supervisor.memory_kills import MemoryKills, gibibytes
from mpidist.supervisor.policy import Attempt

GIB = 1 << 30
HELD = "it used 3 GiB at its last heartbeat, and the limit of its control group is 4 GiB"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def second(root, path, pid="self", kills=0, limit="max"):
    """A group of version 2, and a process in it."""
    folder = root / "sys/fs/cgroup" / path
    write(root / f"proc/{pid}/cgroup", f"0::/{path}\n")
    write(folder / "memory.events", f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {kills}\n")
    write(folder / "memory.max", f"{limit}\n")


def first(root, path, pid="self", kills=0, limit=9223372036854771712):
    """The same of version 1, where other controllers have other paths."""
    folder = root / "sys/fs/cgroup/memory" / path
    write(root / f"proc/{pid}/cgroup", f"9:cpu,cpuacct:/other\n4:memory:/{path}\n0::/\n")
    write(folder / "memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    write(folder / "memory.limit_in_bytes", f"{limit}\n")


VERSIONS = [first, second]


def sign(rank, host="here", **more):
    known = {"peak": 3 * GIB, "kills": 0, "kills_before": 0, "limit": 4 * GIB, "group": 7}
    left, pid = more.pop("left", False), more.pop("pid", 100 + rank)
    return Sign(rank, 5, 3, 0, left, pid, host, **{**known, **more})


@pytest.mark.parametrize("version", VERSIONS)
def test_the_groups_of_both_versions(tmp_path, version):
    version(tmp_path, "job", limit=4 * GIB)
    version(tmp_path, "job/step", kills=2)
    group = group_of(root=tmp_path)
    assert (group.kills(), group.limit()) == (2, 4 * GIB)
    version(tmp_path, "job/step", kills=3, limit=GIB)
    assert (group.kills(), group.limit()) == (3, GIB)
    # The path of a container's process is the host's, and what is seen is its own group.
    version(tmp_path, "", kills=1, limit=GIB)
    write(
        tmp_path / "proc/9/cgroup",
        (tmp_path / "proc/self/cgroup").read_text().replace(":/", ":/a/b"),
    )
    assert group_of(9, tmp_path).kills() == 1


def test_no_groups_at_all(tmp_path):
    assert group_of(root=tmp_path) is None
    kills = MemoryKills([], "here", tmp_path)
    kills.see([sign(0)])
    assert kills.text([sign(0, kills=-1, kills_before=-1), sign(1, heard=True)]) == ""
    assert kills.text([]) == ""
    assert peak_memory() > 1 << 20
    assert peak_memory(root=tmp_path) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_the_rank_that_was_lost_is_named(tmp_path, version):
    version(tmp_path, "job", limit=4 * GIB)
    version(tmp_path, "job", pid=101)
    kills = MemoryKills([], "here", tmp_path)
    signs = [sign(0, heard=True), sign(1), sign(2, left=True), sign(3, failed=True)]
    kills.see(signs)
    assert kills.text(signs) == ""  # killed by somebody else
    version(tmp_path, "job", kills=1)
    assert (
        kills.text(signs) == f"rank 1 on here was killed by the kernel for lack of memory: {HELD}"
    )


def test_of_several_that_are_gone(tmp_path):
    """The first one; where nobody saw the order, the largest, which is whom the kernel takes."""
    second(tmp_path, "job", kills=1)
    order = []
    kills = MemoryKills(order, "here", tmp_path)
    signs = [sign(0, peak=GIB), sign(1, peak=2 * GIB), sign(2, peak=GIB)]
    assert kills.text(signs).startswith("rank 1 on here was killed by the kernel")
    order.extend([102, 101, 100])
    assert kills.text(signs).startswith("rank 2 on here was killed by the kernel")


def test_groups_of_their_own_tell_exactly(tmp_path):
    """As Slurm's tasks have; also when the folders are gone with the step."""
    for rank in (0, 1):
        second(tmp_path, f"job/task_{rank}", pid=100 + rank, kills=rank)
    kills = MemoryKills([], "here", tmp_path)
    signs = [sign(0, peak=3 * GIB, group=1), sign(1, peak=GIB, group=2)]
    kills.see(signs)
    assert kills.text(signs).startswith("rank 1 on here was killed by the kernel")


def test_other_hosts_tell_by_those_that_live(tmp_path):
    kills = MemoryKills([], "here", tmp_path)
    signs = [sign(0, "far"), sign(1, "far", kills=1, heard=True), sign(2, "further")]
    assert kills.text(signs).startswith("rank 0 on far was killed by the kernel")
    assert kills.text([sign(0, "far"), sign(1, "far", kills=1, heard=True, group=8)]) == ""


def test_without_a_limit_it_was_the_host(tmp_path):
    second(tmp_path, "job", kills=1)
    kills = MemoryKills([], "here", tmp_path)
    assert "no limit, so its host had no free memory" in kills.text([sign(0, limit=0)])


def test_ranks_that_tell_nothing(tmp_path):
    second(tmp_path, "job", limit=GIB)
    kills = MemoryKills([], "here", tmp_path)
    second(tmp_path, "job", kills=1, limit=GIB)
    assert kills.text([]) == (
        "the kernel killed a process here for lack of memory, and the limit of its control group "
        "is 1 GiB; without md.guard the rank is unknown"
    )


def test_it_stands_in_the_line_of_the_attempt():
    attempt = Attempt(2, 137, 0.0, step=3, first=0, told=2, memory="rank 1 on a was killed")
    assert attempt.text() == "exit code 137 at step 3; rank 1 on a was killed"
    assert gibibytes(3 << 29) == "1.5 GiB"
