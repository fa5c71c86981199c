"""The installed MPI understands the files that `bench allreduce --advise` writes (issue 3)."""

import json
import sys
from pathlib import Path

import pytest

from mpidist.advice import advise, mpi_algorithms
from mpidist.errors import MpidistError
from mpidist.launch.launchers import (
    find_launcher,
    launch,
    launch_environment,
    launcher_command,
    launcher_kind,
)
from mpidist.launch.processes import run

BITS = [sys.executable, str(Path(__file__).with_name("programs") / "native_bits.py")]
OPEN_MPI = launcher_kind(find_launcher())[0] == "openmpi"


def bits(variables) -> list[str]:
    return launch(5, BITS, env=variables).check().stdout.split()


def setting(name):
    settings = mpi_algorithms.open_mpi(5, 1) if OPEN_MPI else mpi_algorithms.mpich()
    return next(s for s in settings if s.name == name)


def test_mpi_does_what_the_files_say(tmp_path):
    """The order of additions shows which algorithm ran: the ring for long vectors, from the file.

    Open MPI ignores a rules file that it cannot read, without a word.
    """
    ring = setting("ring")
    short, long = bits({})
    forced_short, forced_long = bits(ring.variables)
    assert forced_long != long
    variables = ring.variables
    if OPEN_MPI:
        path = tmp_path / "a folder" / "allreduce.rules"
        path.parent.mkdir()
        chosen = {8: mpi_algorithms.DEFAULT, 1 << 16: ring}
        path.write_text(mpi_algorithms.rules_file(chosen, 5, 1, "a test"))
        variables, forced_short = mpi_algorithms.with_rules(str(path), 1), short
    script = tmp_path / "mpi.env"
    script.write_text(mpi_algorithms.shell(variables, "a test"))
    words = ["sh", "-c", f'. {script}; exec "$@"', "sh", *launcher_command(5), *BITS]
    found = run(words, env=launch_environment()).check().stdout.split()
    assert found == [forced_short, forced_long]


@pytest.mark.exhaustive
def test_it_measures_writes_and_measures_again(tmp_path, monkeypatch):
    """With real ranks, one algorithm, and a bar so low that there is always something to write."""
    wanted = "recursive doubling"
    monkeypatch.setattr(mpi_algorithms, "open_mpi", lambda *_: [setting_of[wanted]])
    monkeypatch.setattr(mpi_algorithms, "mpich", lambda: [setting_of[wanted]])
    monkeypatch.setattr(mpi_algorithms, "GAIN", 0.0)
    monkeypatch.setattr(mpi_algorithms, "LOSS", 0.0)
    monkeypatch.setattr(advise, "PASSES", 1)
    monkeypatch.setattr(advise, "CHECKS", 1)
    monkeypatch.setattr(advise, "_keep_what_holds", lambda *_: None)
    said = []
    there = advise.site(2, None, ["--rounds", "3", "--step", "8"], [1000, 8000])
    rows = advise.advise(there, advise.installed_mpi(), tmp_path / "out", said.append)
    assert [(row["bytes"], row["algorithm"]) for row in rows] == [(1000, wanted), (8000, wanted)]
    assert all(row["default_us"] > 0 and row["advised_us"] > 0 for row in rows)
    assert "2 ranks on 1 host" in said[0]
    assert (tmp_path / "out" / "mpi.env").exists()
    assert (tmp_path / "out" / "allreduce.rules").exists() == OPEN_MPI


setting_of = {"recursive doubling": setting("recursive doubling")}


def test_an_algorithm_that_is_not_there_is_found_out():
    """Open MPI complains and goes on with its default: that must not count as the algorithm."""
    there = advise.site(2, None, ["--rounds", "1"], [8])
    variables = {
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "99",
        "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "99",
    }
    with pytest.raises(MpidistError, match=r"mpi(exec|run) -n 2 .* ended with"):
        there.times(mpi_algorithms.Setting("99", variables))


def test_bench_explain(tmp_path):
    """What was chosen, by how much, and where from: measured now, then the cache."""
    words = [sys.executable, "-m", "mpidist", "bench", "allreduce", "--explain", "--max", "64",
             "--step", "8", "--json", str(tmp_path / "rows.json")]  # fmt: skip
    env = {"MPIDIST_SELECTION_CACHE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    first = launch(2, words, env=env).check().stdout
    assert "2 of 2 size classes measured now" in first
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["bytes"] for row in rows] == [8, 64]
    # Of two that are within 3 % the simpler is taken; what is printed is rounded.
    assert all(row["us"][row["algorithm"]] <= 1.04 * min(row["us"].values()) for row in rows)
    (table,) = [line for line in first.splitlines() if line.startswith("# fingerprint ")]
    assert len(table.split()[2].rstrip(":")) == 16
    assert launch(1, words, env=env).returncode == 2


def test_hosts_of_ranks_that_write_word_by_word(monkeypatch):
    """PYTHONUNBUFFERED, common in batch scripts, makes each word a write of its own."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    there = advise.site(4, None, [], [8])
    assert [len(there.hosts()) for _ in range(3)] == [4] * 3
