"""The stored choices of `auto` are recent, clear and undamaged, or they are ignored (issue 3)."""

import json

import pytest

from mpidist.collectives.selection_cache import (
    DAYS,
    Remembered,
    busy,
    facts_of,
    fingerprint,
    margin,
    write_whole,
)

FACTS = {"MPI": "Some MPI 1.0", "ranks": 4}
ENTRY = {"algorithm": "ring", "ranks": 4, "won": 1.0, "us": {"native": 15.0, "ring": 10.0}}
NOW = 1_800_000_000.0


def test_what_was_kept_is_read_for_a_week(tmp_path):
    """It is measured anew after that, and a clock that has been set back gives no eternal entry."""
    cache = Remembered(FACTS, tmp_path / "not" / "there" / "yet")
    cache.keep("1024", ENTRY, NOW)
    cache.keep("2048", {**ENTRY, "us": {"native": 20.0, "ring": 12.0}}, NOW + 86400)
    assert {key: e["us"]["ring"] for key, e in cache.read(NOW + 86400).items()} == {
        "1024": 10.0,
        "2048": 12.0,
    }
    assert set(cache.read(NOW + DAYS * 86400)) == {"2048"}
    assert cache.read(NOW - 86400) == {}
    assert Remembered({**FACTS, "ranks": 8}, cache.path.parent).read(NOW) == {}
    assert list(cache.path.parent.iterdir()) == [cache.path]


@pytest.mark.parametrize(
    "unclear", [{"us": {"native": 10.5, "ring": 10.0}}, {"won": 0.6}], ids=["close", "disturbed"]
)
def test_what_was_not_clear_is_measured_in_every_run(tmp_path, unclear):
    """A noisy first measurement is not frozen."""
    cache = Remembered(FACTS, tmp_path)
    cache.keep("1024", {**ENTRY, **unclear}, NOW)
    assert cache.read(NOW) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"format": 1}', b'{"format": 2, "entries": {}}',
        b'{"format": 1, "entries": [1]}', b'{"format": 1, "entries": {"8": 3}}',
        b'{"format": 1, "entries": {"8": {"us": {"ring": 1.0}, "time": 1800000000}}}',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_is_no_file(tmp_path, damage):
    cache = Remembered(FACTS, tmp_path)
    cache.path.write_bytes(damage)
    assert cache.read(NOW) == {}
    cache.keep("1024", ENTRY, NOW)
    assert set(cache.read(NOW)) == {"1024"}


@pytest.mark.parametrize("wrong", [{"algorithm": "tree"}, {"us": {"ring": "fast"}}, {"us": {}}])
def test_entries_that_make_no_sense_are_passed_over(tmp_path, wrong):
    cache = Remembered(FACTS, tmp_path)
    cache.keep("8", ENTRY, NOW)
    content = json.loads(cache.path.read_text())
    content["entries"]["16"] = {**content["entries"]["8"], **wrong}
    content["entries"]["x"] = content["entries"]["8"]
    cache.path.write_text(json.dumps(content))
    assert set(cache.read(NOW)) == {"8"}


def test_no_home_and_no_room_are_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    for folder in (None, blocked / "mpidist"):
        cache = Remembered(FACTS, folder)
        cache.keep("1024", ENTRY, NOW)
        assert cache.read(NOW) == {}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write_whole(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_fingerprint_tells_what_differs():
    """Ranks, their places, and how MPI was tuned are other clusters; the order of facts is not."""
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    base = facts_of([0, 0, 1, 1], {})
    others = [
        facts_of([0, 1, 0, 1], {}),
        facts_of([0, 0, 1, 1, 1], {}),
        facts_of([0, 0, 0, 0], {}),
        facts_of([0, 0, 1, 1], {"settings": {"UCX_TLS": "tcp"}}),
    ]
    assert len({fingerprint(facts) for facts in (base, *others)}) == 5
    assert fingerprint(facts_of([0, 0, 1, 1], {})) == fingerprint(base)
    assert base["cpu"]
    assert base["code"]


def test_busy(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (4.2, 0.0, 9.0))
    assert busy(2)
    assert not busy(4)


def test_margin():
    assert margin({"a": 30.0, "b": 10.0, "c": 12.0}) == 1.2
    assert margin({"a": 1.0}) == float("inf")
