"""The algorithm that "auto" selects is equal on all ranks, stored and explained (issue 3)."""

import json

import numpy as np
import pytest

import mpidist as md
from mpidist.advice.explain import explain, explanation_lines, saved_table
from mpidist.collectives import selection
from mpidist.launch import environment

LENGTHS = (2, 3000, 100_000)


def chosen(comm, folder):
    """The table of a fresh communicator after calls of all lengths."""
    other = comm.Dup()
    selection.remember_in(other, folder)
    for n in LENGTHS:
        x = np.ones(n, np.float32)
        md.allreduce(other, x)
        assert (x == comm.size).all()
    table = selection.table(other)
    md.free(other)
    other.Free()
    assert comm.allgather(table) == [table] * comm.size
    return table


def remembered_by(comm, folder) -> dict:
    """What is in the one file of the folder, read by rank 0 for all."""
    content = None
    if comm.rank == 0:
        (path,) = folder.glob("selection-*.json")
        content = json.loads(path.read_text())
    return comm.bcast(content)


def steady(monkeypatch):
    """Let every measurement be clear, whatever else the machine does."""
    monkeypatch.setattr(selection.selection_cache, "MARGIN", 1.0)
    monkeypatch.setattr(selection.selection_cache, "WON", 0.0)
    monkeypatch.setattr(selection.selection_cache, "busy", lambda ranks: False)


@pytest.mark.ranks(2, 3, further=(5,))
def test_the_next_run_takes_what_this_one_measured(comm, folder, monkeypatch):
    steady(monkeypatch)
    first = chosen(comm, folder)
    assert [entry["from"] for entry in first.values()] == ["measured"] * 3
    kept = remembered_by(comm, folder)
    assert set(kept["entries"]) == set(first)
    assert kept["facts"]["ranks"] == comm.size
    second = chosen(comm, folder)
    assert [entry["from"] for entry in second.values()] == ["cache"] * 3
    assert [e["us"] for e in second.values()] == [e["us"] for e in first.values()]
    assert selection.table_fingerprint(second) == selection.table_fingerprint(first)


@pytest.mark.ranks(3)
def test_ranks_with_other_homes_choose_alike(comm, folder, monkeypatch):
    """What rank 0 finds counts, also where another rank would find something else, or nothing."""
    steady(monkeypatch)
    chosen(comm, folder if comm.rank != 1 else None)
    table = chosen(comm, folder if comm.rank == 0 else None)
    assert {entry["from"] for entry in table.values()} == {"cache"}


@pytest.mark.ranks(2)
def test_a_damaged_or_foreign_file_is_measured_anew(comm, folder, monkeypatch):
    steady(monkeypatch)
    chosen(comm, folder)
    if comm.rank == 0:
        (path,) = folder.glob("selection-*.json")
        content = json.loads(path.read_text())
        for entry in content["entries"].values():
            entry["us"] = {"carrier pigeon": 1.0, **entry["us"]}
            entry["algorithm"] = "carrier pigeon"
        path.write_text(json.dumps(content))
    comm.Barrier()
    table = chosen(comm, folder)
    assert {entry["from"] for entry in table.values()} == {"measured"}
    if comm.rank == 0:
        path.write_bytes(b"\0" * 5)
    comm.Barrier()
    assert {entry["from"] for entry in chosen(comm, folder).values()} == {"measured"}


@pytest.mark.ranks(2)
def test_a_checkpoint_goes_before_the_cache(comm, folder, monkeypatch):
    """R37: a resumed run adds in the order of the run that it continues."""
    steady(monkeypatch)
    table = chosen(comm, folder)
    forced = {key: {**entry, "algorithm": "tree"} for key, entry in table.items()}
    other = comm.Dup()
    selection.remember_in(other, folder)
    selection.restore(other, forced)
    assert md.plan(other, np.ones(3000, np.float32)).algorithm == "tree"
    entry = selection.table(other)["16384"]
    assert entry["from"] == "checkpoint"
    assert entry["algorithm"] == "tree"
    md.free(other)
    other.Free()


@pytest.mark.ranks(2)
def test_the_fastest_is_chosen_and_nothing_kept_where_it_is_off(comm, folder):
    for entry in chosen(comm, None).values():
        assert 0 <= entry["won"] <= 1
        # Two digits behind the point are kept.
        assert entry["us"][entry["algorithm"]] <= 1.03 * min(entry["us"].values()) + 0.02
    assert list(folder.iterdir()) == []


@pytest.mark.ranks(2)
def test_nothing_is_remembered_from_a_busy_machine(comm, folder, monkeypatch):
    """What was measured beside other work may be wrong without it, however clear it looks."""
    steady(monkeypatch)
    monkeypatch.setattr(selection.selection_cache, "busy", lambda ranks: True)
    chosen(comm, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.ranks(2)
def test_explain_says_where_a_choice_is_from(comm, folder):
    """A checkpoint's frozen table goes first, what is not in there is measured now."""
    entry = {"algorithm": "ring", "ranks": 2, "won": 1.0, "us": {"native": 9.0, "ring": 3.0}}
    state = {"w": np.zeros(3), "run": {"step": 1, "selection": {"1024": entry}}}
    with md.CheckpointStore(comm, folder) as store:
        store.save(1, state)
    saved = saved_table(folder)
    assert saved == {"1024": entry}
    rows, seconds = explain(comm, [600, 4000], "f4", saved)
    assert [(row["bytes"], row["from"]) for row in rows] == [
        (1024, "checkpoint"),
        (4096, "measured"),
    ]
    assert rows[0] == {
        "bytes": 1024, "algorithm": "ring", "from": "checkpoint", "won": 1.0, "margin": 3.0,
        "us": {"native": 9.0, "ring": 3.0},
    }  # fmt: skip
    assert seconds > 0
    head, first, second = explanation_lines(rows)
    assert head.split()[:5] == ["#", "Size", "chosen", "margin", "rounds"]
    assert first.split() == ["1024", "ring", "3.00", "100%", "checkpoint", "9.00", "3.00", "-"]
    assert second.split()[0] == "4096"


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"native": 9, "ring": 5.0, "butterfly": 5.1}, "butterfly"),  # equal but for noise
        ({"native": 9, "ring": 5.0, "butterfly": 5.2}, "ring"),
        ({"native": 9, "ring": 5.1, "butterfly": 5.0}, "butterfly"),
        ({"native": 5.1, "ring": 5.0, "butterfly": 5.1}, "native"),
        ({"native": 5.1, "butterfly": 5.0}, "native"),
        ({"native": 5.2, "node": 5.0}, "node"),
        ({"native": 9, "ring": 5.0}, "ring"),
    ],
)
def test_of_equal_ones_the_simpler(seconds, best):
    names = tuple(seconds)
    assert names[selection._fastest(names, np.array([*seconds.values()]))] == best


def test_where_it_is_remembered():
    """XDG_CACHE_HOME, ~/.cache, or nowhere; MPIDIST_SELECTION_CACHE=0 switches it off."""
    folder = environment.cache_folder
    assert str(folder({"HOME": "/h"})) == "/h/.cache/mpidist"
    assert str(folder({"HOME": "/h", "XDG_CACHE_HOME": "/x"})) == "/x/mpidist"
    assert str(folder({"HOME": "/h", "XDG_CACHE_HOME": "x"})) == "/h/.cache/mpidist"
    assert folder({}) is None
    assert folder({"HOME": "/h", "MPIDIST_SELECTION_CACHE": "0"}) is None
    assert environment.cache_folder() is None  # the developer's own must not be touched by tests


def test_settings_of_mpi_belong_to_the_fingerprint():
    """A rules file makes another MPI of it; where the job was started from does not."""
    tuned = {"OMPI_MCA_coll_tuned_dynamic_rules_filename": "/r", "UCX_TLS": "tcp"}
    assert (
        environment.mpi_settings({**tuned, "OMPI_MCA_initial_wdir": "/w", "PATH": "/bin"}) == tuned
    )
