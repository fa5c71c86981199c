"""`bench allreduce --advise` without MPI: which settings it tries, accepts and writes (issue 3)."""

import pytest

from mpidist.advice import advise, mpi_algorithms
from mpidist.advice.mpi_algorithms import DEFAULT, Setting
from mpidist.errors import ConfigError, MpidistError

RING = Setting("ring", {"A": "ring"}, rule=(4, 0))
TREE = Setting("tree", {"A": "tree"}, low=64, rule=(5, 65536))


def test_what_gains_in_each_pass_is_taken():
    """Faster once and slower once is noise; the median of the gains decides among the others."""
    passes = {
        "default": [{8: 10.0, 64: 10.0}, {8: 10.0, 64: 20.0}],
        "ring": [{8: 5.0, 64: 8.0}, {8: 11.0, 64: 10.0}],
        "tree": [{64: 4.0}, {64: 12.0}],
    }
    assert mpi_algorithms.best_for(passes, [RING, TREE], 8) == DEFAULT
    assert mpi_algorithms.best_for(passes, [RING, TREE], 64) == TREE
    assert mpi_algorithms.best_for(passes, [RING], 64) == RING
    assert mpi_algorithms.best_for_all(passes, [RING, TREE], [8, 64]) == RING
    passes["ring"][1][8] = 13.0
    assert mpi_algorithms.best_for_all(passes, [RING, TREE], [8, 64]) == RING
    passes["ring"][0][8] = 12.0  # a tenth of the time more at 8 bytes is too much
    assert mpi_algorithms.best_for_all(passes, [RING, TREE], [8, 64]) == DEFAULT
    del passes["ring"]
    assert mpi_algorithms.best_for_all(passes, [RING, TREE], [8, 64]) == DEFAULT


def test_rules_file():
    """A rule for 0 bytes first, ranges that meet half way, other communicators as they were."""
    chosen = {64: DEFAULT, 256: RING, 1024: RING, 4096: TREE, 16384: DEFAULT}
    text = mpi_algorithms.rules_file(chosen, 6, 1, "somewhere")
    rules = [line.split("#")[0].split() for line in text.splitlines()]
    assert [r for r in rules if r] == [
        ["1"], ["2"], ["2"],
        ["6"], ["4"],
        ["0", "0", "0", "0"], ["128", "4", "0", "0"], ["2048", "5", "0", "65536"],
        ["8192", "0", "0", "0"],
        ["7"], ["1"], ["0", "0", "0", "0"],
    ]  # fmt: skip
    first = mpi_algorithms.rules_file({64: RING}, 2, 1, "")
    assert "64 4 0 0" in first  # nothing was measured below


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_open_mpi_settings(ranks):
    """Algorithms that cut a vector into parts are not tried where there are fewer elements."""
    settings = mpi_algorithms.open_mpi(ranks, nodes=1)
    assert {s.rule[0] for s in settings} == set(range(1, 8))
    assert all(s.low >= 16 * ranks for s in settings if s.rule[0] in (4, 5, 6))
    assert all(s.variables["OMPI_MCA_coll_tuned_use_dynamic_rules"] == "1" for s in settings)
    assert "OMPI_MCA_coll_han_priority" not in settings[0].variables
    assert mpi_algorithms.with_rules("/r", 2)["OMPI_MCA_coll_han_priority"] == "0"


def test_shell_quotes():
    text = mpi_algorithms.shell({"A": "/a folder/it's"}, "x")
    assert text == "# x\nexport A='/a folder/it'\"'\"'s'\n"


class FakeSite:
    """Times by a script: setting -> bytes -> microseconds; `advised` may be another story."""

    def __init__(self, times, hosts=("a", "a")):
        self.script, self.sizes, self._hosts = times, [64, 1024], list(hosts)

    def hosts(self):
        return self._hosts

    def times(self, setting):
        if setting.name not in self.script:
            raise MpidistError("no such algorithm")
        found = self.script[setting.name]
        return {n: found[n] for n in self.sizes if setting.low <= n <= (setting.high or n)}


def advised(tmp_path, times, library="Open MPI 5.0.11", hosts=("a", "a")):
    said = []
    rows = advise.advise(FakeSite(times, hosts), library, tmp_path / "out", said.append)
    files = {p.name: p.read_text() for p in (tmp_path / "out").glob("*")}
    return rows, files, "\n".join([*said, *advise.advice_lines(rows, tmp_path / "out", library)])


def test_a_gain_is_written_and_shown(tmp_path):
    times = {
        "default": {64: 10, 1024: 40},
        "ring": {64: 10, 1024: 20},
        "linear": {64: 11, 1024: 90},
    }
    rows, files, text = advised(tmp_path, {**times, "advised": {64: 10, 1024: 16}})
    assert [(r["algorithm"], r["default_us"], r["advised_us"], r["ratio"]) for r in rows] == [
        ("default", 10, 10, 1.0), ("ring", 40, 16, 2.5),
    ]  # fmt: skip
    assert rows[1]["tried"] == {"default": 40, "ring": 20, "linear": 90}
    assert "\n256 4 0 0 # ring\n" in files["allreduce.rules"]
    path = tmp_path / "out" / "allreduce.rules"
    assert f"dynamic_rules_filename={path}\n" in files["mpi.env"]
    assert "2.50 times as fast over the 1 sizes" in text
    assert "Rabenseifner does not run here" in text


def test_what_is_not_confirmed_is_taken_back(tmp_path):
    times = {"default": {64: 10, 1024: 40}, "ring": {64: 9, 1024: 20}, "linear": {64: 5, 1024: 20}}
    rows, files, text = advised(tmp_path, {**times, "advised": {64: 11, 1024: 20}})
    assert [r["algorithm"] for r in rows] == ["default", "linear"]
    assert "64 bytes: linear was 0.91 times as fast, default kept" in text
    assert "\n64 1" not in files["allreduce.rules"]
    rows, files, text = advised(tmp_path, {**times, "advised": {64: 11, 1024: 41}})
    assert files == {}
    assert "nothing to advise" in text


def test_nothing_gained(tmp_path):
    times = {"default": {64: 10, 1024: 40}, "ring": {64: 10, 1024: 39}}
    rows, files, text = advised(tmp_path, times)
    assert files == {}
    assert "MPI chooses well here" in text
    assert [r["ratio"] for r in rows] == [1.0, 1.0]


def test_mpich_has_one_setting_for_all_sizes(tmp_path):
    times = {"default": {64: 10, 1024: 40}, "ring": {64: 10, 1024: 10}, "tree": {64: 9, 1024: 30}}
    rows, files, text = advised(
        tmp_path, {**times, "advised": {64: 11, 1024: 10}}, library="MPICH 5.0.2"
    )
    assert [r["algorithm"] for r in rows] == ["ring", "ring"]
    assert set(files) == {"mpi.env"}
    assert "export MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM=ring\n" in files["mpi.env"]
    assert "slower than the default at 64 bytes" in text


def test_between_nodes_the_rules_are_all_or_nothing(tmp_path):
    """Rules count only without coll_han, so where they leave the choice to MPI is no default."""
    own = mpi_algorithms.base(2)
    assert own.variables["OMPI_MCA_coll_han_priority"] == "0"
    times = {
        "default": {64: 10, 1024: 40}, own.name: {64: 12, 1024: 80}, "ring": {64: 12, 1024: 20},
        "advised": {64: 12, 1024: 20},
    }  # fmt: skip
    rows, files, text = advised(tmp_path, times, hosts=("a", "b"))
    assert [r["algorithm"] for r in rows] == [own.name, "ring"]
    assert "1.29 times as fast over the 2 sizes" in text
    assert "slower than the default at 64 bytes" in text
    assert "export OMPI_MCA_coll_han_priority=0\n" in files["mpi.env"]
    times["advised"] = {64: 30, 1024: 20}
    _, files, text = advised(tmp_path, times, hosts=("a", "b"))
    assert files == {}
    assert "nothing to advise" in text


def test_bad_options():
    with pytest.raises(ConfigError, match="--ranks 1: expected 2 or more"):
        advise.site(1, None, [], [8])
    with pytest.raises(ConfigError, match="give the ranks in --launcher"):
        advise.site(4, "srun -n 4", [], [8])
    with pytest.raises(ConfigError, match="cannot start no-such-mpirun"):
        advise.site(None, "no-such-mpirun -n 2", [], [8]).hosts()
    with pytest.raises(ConfigError, match="knows Open MPI and MPICH"):
        advise.advise(FakeSite({}), "Intel MPI 2021", None, print)
