"""With damaged, missing, swapped or foreign files, a load gives right bits or the step before."""

import json
import os
import random
import shutil

import pytest
from checkpoint_solo import Solo, equal, resumed, state_of
from forged_manifest import (
    OFFSET,
    START,
    TABLE,
    TENSOR,
    body_of,
    decoded,
    forge,
    newest,
    put,
    sealed,
    swap_pieces,
)

from mpidist import events
from mpidist.checkpoint import histories
from mpidist.checkpoint.format.decode import decode
from mpidist.checkpoint.format.manifest import MAX_BYTES, NAME, Damaged
from mpidist.checkpoint.format.state import Unreadable
from mpidist.checkpoint.load import load, load_step
from mpidist.checkpoint.storage import steps
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import CheckpointError, NoCheckpoint

BLOCK = 256


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A store of steps 1 and 2, in blocks of 256 bytes so that few bytes are many blocks."""
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpidist.checkpoint.storage.files.BLOCK", BLOCK)
        with CheckpointStore(Solo(), folder) as store:
            for step in (1, 2):
                store.save(step, state_of(step))
    return folder


@pytest.fixture
def copy(good, tmp_path):
    shutil.copytree(good, tmp_path / "store")
    return tmp_path / "store"


def outcome(folder, said):
    """Load both ways; returns the step, having checked that it is that step to the last bit."""
    step, state = load_step(folder)
    assert equal(state, state_of(step))
    like = state_of(77)
    with CheckpointStore(Solo(), folder) as store:
        restored, filled = store.restore(like)
        assert equal(filled, state_of(restored))
        assert filled["parameters"]["w"] is like["parameters"]["w"]
        whole, state = store.restore()
    assert equal(state, state_of(whole))
    text = said.readouterr().err
    for got in (step, restored, whole):
        assert (got == 1) == ("passed over" in text)
    assert (text.count("passed over") == 3) == (step == 1)
    return step


def flip(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit(copy, seed, capfd):
    """R96: forty seeded flips over shard and manifest: found by digest, the step before is used."""
    rng = random.Random(seed)
    target = newest(copy) / (NAME if seed % 4 == 0 else "shard-00000.h5")
    flip(target, rng)
    step = outcome(copy, capfd)
    with CheckpointStore(Solo(), copy) as store, pytest.raises(CheckpointError, match="damaged"):
        store.verify(2)  # also in bytes that no array needs, such as HDF5's own
    if target.name == NAME:
        assert step == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_truncated_file(copy, seed, capfd):
    """Twenty truncations, the empty file and the last byte included."""
    rng = random.Random(seed)
    target = newest(copy) / (NAME if seed % 4 == 0 else "shard-00000.h5")
    size = target.stat().st_size
    os.truncate(target, {0: 0, 1: 0, 2: size - 1, 4: size - 1}.get(seed, rng.randrange(size)))
    assert outcome(copy, capfd) == 1


def test_a_longer_file(copy, capfd):
    with (newest(copy) / "shard-00000.h5").open("ab") as file:
        file.write(b"x")
    assert outcome(copy, capfd) == 1


def test_a_deleted_shard(copy, capfd):
    (newest(copy) / "shard-00000.h5").unlink()
    assert outcome(copy, capfd) == 1
    assert [e[2]["step"] for e in events.recent if e[1] == "checkpoint_damaged"][-1] == 2


def test_a_deleted_manifest_is_no_checkpoint(copy):
    """Without its commit record a folder is what an interrupted removal leaves."""
    (newest(copy) / NAME).unlink()
    assert load_step(copy)[0] == 1
    with CheckpointStore(Solo(), copy) as store:
        assert store.all_steps() == [1]


def test_the_shard_or_manifest_of_another_step(copy, capfd):
    """Same name, same size, right digests of its own: still not this step."""
    older = copy / "step-000000000001"
    assert (older / "shard-00000.h5").stat().st_size == (
        newest(copy) / "shard-00000.h5"
    ).stat().st_size
    shutil.copy(older / "shard-00000.h5", newest(copy))
    assert outcome(copy, capfd) == 1
    shutil.copy(older / NAME, newest(copy))
    assert outcome(copy, capfd) == 1


def test_swapped_shards(tmp_path, monkeypatch, capfd):
    """Two shards of one step that have changed names."""
    import checkpoint_solo

    store = checkpoint_solo.two_ranks(tmp_path, [1, 2])
    one, two = (store / "step-000000000002" / f"shard-0000{i}.h5" for i in (0, 1))
    assert equal(load(store), checkpoint_solo.split_state(2))
    one.rename(one.with_suffix(".x"))
    two.rename(one)
    one.with_suffix(".x").rename(two)
    step, state = load_step(store)
    assert step == 1
    assert equal(state, checkpoint_solo.split_state(1))
    assert "passed over" in capfd.readouterr().err


def test_an_extra_file_changes_nothing_and_stays(copy, capfd):
    notes = newest(copy) / "notes.txt"
    notes.write_text("mine")
    (copy / "step-1").mkdir()
    (copy / "step-000000000009").mkdir()
    (copy / "step-000000000008").write_text("a file")
    assert outcome(copy, capfd) == 2
    with resumed(copy, keep=1) as store:
        store.save(3, state_of(3))
        store.verify(3)
        store.save(4, state_of(4))
    assert notes.read_text() == "mine"
    assert histories.all_steps(str(copy)) == [3, 4]


def test_a_duplicated_key_with_a_right_digest(copy, capfd):
    text = json.dumps(body_of(copy))
    (newest(copy) / NAME).write_bytes(sealed(text))
    assert decoded(copy).step == 2
    (newest(copy) / NAME).write_bytes(sealed('{"step": 2, ' + text[1:]))
    assert outcome(copy, capfd) == 1
    with pytest.raises(Damaged, match="key twice"):
        decoded(copy)


#: What is done to the body of the manifest and to that of its table.
ATTACKS = {
    "a path out": lambda b, t: t.update(name="../../etc/passwd"),
    "a name with a newline": lambda b, t: t.update(name="shard-00000.h5\n"),
    "another name": lambda b, t: t.update(name="shard-1.h5"),
    "the table of another shard": lambda b, t: t.update(name="shard-00001.h5"),
    "a table outside": lambda b, t: b["tables"][0].update(name="../shard-00000.table"),
    "a giant table": lambda b, t: b["tables"][0].update(size=2**40),
    "a table twice": lambda b, t: b["tables"].append(b["tables"][0]),
    "a table less": lambda b, t: b["tables"].pop(),
    "a negative size": lambda b, t: t.update(size=-1),
    "too few checksums": lambda b, t: t["crc32"].pop(),
    "a true step": lambda b, t: b.update(step=True),
    "a float": lambda b, t: b["tensors"]["shapes"].__setitem__(0, [50.0, 7]),
    "a huge shape": lambda b, t: b["tensors"]["shapes"].__setitem__(0, [2**40, 2**40]),
    "a huge empty shape": lambda b, t: b["tensors"]["shapes"].__setitem__(-1, [0, 2**61]),
    "huge shapes together": lambda b, t: b["tensors"]["shapes"].__setitem__(
        slice(0, 3), [[2**58], [2**58], [2**59]]
    ),
    "a shape more": lambda b, t: b["tensors"]["shapes"].append([1]),
    "no block": lambda b, t: b.update(block=0),
    "behind the end": put(0, OFFSET, 10**6),
    "far behind the end": put(0, OFFSET, 2**63 - 1),
    "before the beginning": put(0, OFFSET, -8),
    "shared bytes": lambda b, t: put(0, OFFSET, t["rows"][1][OFFSET])(b, t),
    "a hole": put(0, START + 2, 49),
    "twice the same": lambda b, t: (
        t["rows"].append(t["rows"][0]),
        t.update(pieces=len(t["rows"])),
    ),
    "swapped pieces": swap_pieces,
    "outside": put(0, START, 1),
    "far outside": put(0, START, 2**63 - 1),
    "inside out": put(0, START + 2, -(2**63)),
    "a flat range with rows": put(0, 2, 1),
    "a piece of nothing": put(0, TENSOR, 99),
    "a piece of less than nothing": put(0, TENSOR, -1),
    "more pieces than there are": lambda b, t: t.update(pieces=t["pieces"] + 1),
    "fewer pieces than there are": lambda b, t: t.update(pieces=t["pieces"] - 1),
    "a piece that is none": lambda b, t: t.update(pieces=0),
    "pieces without axes": lambda b, t: t.update(rows=[row[:3] for row in t["rows"]]),
    "a name twice": lambda b, t: [
        b["tensors"][key].append(b["tensors"][key][-1]) for key in b["tensors"]
    ],
    "a leaf in a leaf": lambda b, t: b["tensors"]["paths"].__setitem__(-1, ["mask", "x"]),
    "no path": lambda b, t: b["tensors"]["paths"].__setitem__(0, []),
    "a number as a key": lambda b, t: b["tensors"]["paths"].__setitem__(0, [1]),
    "an object as an extra": lambda b, t: b["extras"][0].update(value={"__class__": "x"}),
    "another program": lambda b, t: b.update(format="other"),
    "another program's table": lambda b, t: t.update(format="other"),
    "no tensors": lambda b, t: b.pop("tensors"),
    "no pieces": lambda b, t: t.pop("pieces"),
    "a list": lambda b, t: b.update(tables={}),
}


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_a_forged_manifest_is_damage(copy, attack, capfd):
    """Names, sizes and tiling are proved although the digest is right; no array is allocated."""
    body, table = body_of(copy), body_of(copy, TABLE)
    forge(copy, body, table)
    ATTACKS[attack](body, table)
    if table == body_of(copy, TABLE):
        forge(copy, body)
    else:
        forge(copy, body, table)
    assert outcome(copy, capfd) == 1


def test_what_stands_twice_costs_no_memory(copy, monkeypatch):
    """A table is read once, and the pieces of a tensor are not listed for each of its names."""
    body, tables = body_of(copy), []
    monkeypatch.setattr(
        steps.files, "read_small", lambda name, *_: tables.append(name) or sealed(body)
    )
    body["tables"] *= 1000
    with pytest.raises(Damaged, match="a table twice"):
        steps.read_manifest(str(copy), steps.Entry(0, 2, 0))
    assert tables == [NAME]

    monkeypatch.undo()
    body, table = body_of(copy), body_of(copy, TABLE)
    for column in body["tensors"].values():
        column += column[:1] * 1000
    table["rows"] *= 10
    table["pieces"] *= 10
    forge(copy, body, table)
    with pytest.raises(Damaged, match="a tensor twice"):
        decoded(copy)


def test_a_block_that_is_too_long_to_be_held(copy):
    """Readers make room for a block, and a file with holes may be as long as it likes."""
    body, table = body_of(copy), body_of(copy, TABLE)
    body["block"], table["crc32"] = MAX_BYTES + 1, table["crc32"][:1]
    forge(copy, body, table)
    with pytest.raises(Damaged, match="has blocks of"):
        decoded(copy)


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, "{}", "[]", '{"step": NaN}', "{"])
def test_json_that_is_no_manifest(text):
    with pytest.raises(Damaged):
        decode(sealed(text), [])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 4}, "format version 4"),
        ({"table": 4}, "shard-00000.table has format version 4"),
        ({"dtype": "<f9"}, "'<f9' is not a dtype"),
        ({"dtype": "object_"}, "is not a dtype"),
        ({"dtype": "|O"}, "is not a dtype"),
        ({"dtype": "<M8[s/0]"}, "is not a dtype"),  # NumPy dies of it
        ({"dtype": "<f4,(,)f4"}, "is not a dtype"),
    ],
)
def test_a_newer_format_is_an_error_not_a_fallback(copy, change, text):
    """Whole but not readable here: going back to an older step would be the wrong answer."""
    body, table = body_of(copy), body_of(copy, TABLE)
    if "dtype" in change:
        body["tensors"]["dtypes"][0] = change["dtype"]
    elif "table" in change:
        table["version"] = change["table"]
    else:
        body.update(change)
    forge(copy, body, table)
    with pytest.raises(CheckpointError, match=text) as caught:
        load(copy)
    assert type(caught.value) is Unreadable


def test_links_pipes_and_giants_are_refused(copy, tmp_path, capfd):
    """A link, a FIFO or a sparse giant in place of a file is damage, and nobody waits for it."""
    shard, manifest = newest(copy) / "shard-00000.h5", newest(copy) / NAME
    aside = tmp_path / "aside"
    for path in (shard, manifest):
        path.rename(aside)
        path.symlink_to(aside)
        assert outcome(copy, capfd) == 1
        path.unlink()
        os.mkfifo(path)
        assert outcome(copy, capfd) == 1
        path.unlink()
        aside.rename(path)
    os.truncate(manifest, MAX_BYTES + 1)
    assert outcome(copy, capfd) == 1
    shutil.rmtree(newest(copy))
    newest(copy).symlink_to(copy / "step-000000000001")
    assert load_step(copy)[0] == 1


def test_nothing_good(copy):
    """The error lists what was tried; arrays given to restore are as they were."""
    rng = random.Random(3)
    for step in (1, 2):
        flip(copy / f"step-00000000000{step}" / NAME, rng)
    with pytest.raises(NoCheckpoint, match=r"tried step-000000000002: .*step-000000000001: "):
        load(copy)
    like = state_of(9)
    with CheckpointStore(Solo(), copy) as store, pytest.raises(NoCheckpoint):
        store.restore(like)
    assert equal(like, state_of(9))
    with pytest.raises(CheckpointError, match=r"step 2 in .* is damaged"):
        load(copy, step=2)


@pytest.mark.parametrize("step", [None, 2])
def test_numbers_that_are_damaged_everywhere(copy, step):
    """Found out when arrays are changed already: the error says so, and is not that of no step."""
    for number in (1, 2):
        shard = copy / f"step-00000000000{number}" / "shard-00000.h5"
        data = bytearray(shard.read_bytes())
        data[data.rindex(state_of(number)["momentum"]["w"].tobytes())] ^= 1
        shard.write_bytes(data)
    with CheckpointStore(Solo(), copy) as store:
        with pytest.raises(
            CheckpointError, match=r"checksum.*reset their values before use"
        ) as caught:
            store.restore(state_of(9), step)
        assert type(caught.value) is CheckpointError
        with pytest.raises(CheckpointError, match=r"checksum$") as caught:
            store.restore(None, step)  # nobody's arrays
        assert type(caught.value) is (NoCheckpoint if step is None else CheckpointError)
