"""The note about ranks that share cores: when it is printed, and which cure it names (issue 3)."""

import os

import pytest

from mpidist.launch import binding
from mpidist.launch.binding import RankPlace, blas_threads, warning


def on(host, *masks, threads=1, host_cores=8):
    return [RankPlace(host, host, tuple(mask), host_cores, threads) for mask in masks]


EIGHT = range(8)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (on("a", [0], [1], [2]), None),
        (on("a", EIGHT, EIGHT, threads=4), None),
        (on("a", [3]), None),
        (on("a", [0], [1]) + on("b", [0], [1]), None),
        (on("a", [0], [0], host_cores=1), ["2 ranks of a take turns on 1 core;"]),
        (on("a", [0], [1], [1]), ["ranks 1, 2 are", "same core 1 of a", "--bind-to core"]),
        (on("a", *[[5]] * 4), ["all 4 ranks of a", "core 5 of 8", "--cpu-bind=cores"]),
        (on("a", [0], [1]) + on("b", [1], [1]) + on("c", [2], [2]),
         ["all 2 ranks of b", "; 1 more likewise"]),
        (on("a", EIGHT, EIGHT, threads=8),
         ["2 ranks of a would run 16 BLAS threads on 8 cores", "OMP_NUM_THREADS=4"]),
        (on("a", *[EIGHT] * 3, threads=8), ["24 BLAS threads on 8 cores", "OMP_NUM_THREADS=2"]),
        (on("a", *[[0, 1]] * 4, threads=2), ["OMP_NUM_THREADS=1"]),
        (on("a", *[[0, 1]] * 4), ["4 ranks of a take turns on 2 cores", "at most 2"]),
        # One core for all comes before too many threads: it is the cause.
        (on("a", [0], [0], threads=8), ["all 2 ranks of a are bound to core 0"]),
    ],
)  # fmt: skip
def test_what_is_said(places, words):
    text = warning(places)
    if words is None:
        assert text is None
    else:
        assert [word for word in words if word not in text] == []
        assert "\n" not in text


def test_hosts_of_one_name_are_told_apart():
    """Virtual machines called `localhost` do not share a core; containers of one machine may."""
    same_name = [RankPlace("node", machine, (0,), 8, 1) for machine in ("one", "two")]
    assert warning(same_name) is None
    containers = [RankPlace(name, "one", (0,), 8, 1) for name in ("c1", "c2")]
    assert "bound to core 0" in warning(containers)


def test_threads_of_the_blas():
    assert blas_threads({}, 8) == 8
    assert blas_threads({"OMP_NUM_THREADS": "2"}, 8) == 2
    assert blas_threads({"OMP_NUM_THREADS": "2,1"}, 8) == 2
    assert blas_threads({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "3"}, 8) == 3
    assert blas_threads({"OMP_NUM_THREADS": "many", "MKL_NUM_THREADS": "0"}, 8) == 8


class Everyone:
    """A communicator on which all ranks are this process."""

    rank = 0

    def __init__(self, size):
        self.size = size

    def allgather(self, mine):
        return [mine] * self.size


def test_whether_ranks_share_cores(monkeypatch):
    """Open MPI must then be told that this is meant; it counts cores and not their threads."""
    monkeypatch.setattr(binding.events, "VERBOSITY", 0)
    cores = len(binding.whole_cores(sorted(os.sched_getaffinity(0))))
    assert not binding.check_binding(Everyone(cores), {})
    assert binding.check_binding(Everyone(cores + 1), {})


def test_this_process():
    mine = binding.rank_place({"OMP_NUM_THREADS": "1"})
    assert set(mine.cores) == os.sched_getaffinity(0)
    assert mine.host_cores >= len(mine.cores)
    assert mine.threads == 1
