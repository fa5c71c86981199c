"""Damaged, missing, swapped and foreign files: bit-identical or the last good step, never else."""

import hashlib
import json
import os
import random
import shutil

import pytest
from checkpoint_solo import Solo, equal, state_of

from mpidist import events
from mpidist.checkpoint import steps
from mpidist.checkpoint.layout import Unreadable
from mpidist.checkpoint.load import load, load_step
from mpidist.checkpoint.manifest import MAX_BYTES, NAME, Damaged, decode
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import CheckpointError, NoCheckpoint

BLOCK = 256


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A store of steps 1 and 2, in blocks of 256 bytes so that few bytes are many blocks."""
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpidist.checkpoint.files.BLOCK", BLOCK)
        with CheckpointStore(Solo(), folder) as store:
            for step in (1, 2):
                store.save(step, state_of(step))
    return folder


@pytest.fixture
def copy(good, tmp_path):
    shutil.copytree(good, tmp_path / "store")
    return tmp_path / "store"


def newest(folder):
    return folder / "step-000000000002"


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
    """Forty seeded flips over shard and manifest: found by digest, the step before is used."""
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
    (newest(copy) / "notes.txt").write_text("mine")
    (copy / "step-1").mkdir()
    (copy / "step-000000000009").mkdir()
    (copy / "step-000000000008").write_text("a file")
    assert outcome(copy, capfd) == 2
    with CheckpointStore(Solo(), copy, keep=1) as store:
        store.save(3, state_of(3))
    assert (newest(copy) / "notes.txt").read_text() == "mine"
    assert steps.all_steps(str(copy)) == [3]


def sealed(body):
    """A manifest with this body and a digest that is right."""
    head = (body if isinstance(body, str) else json.dumps(body))[:-1].encode()
    return head + f',"sha256":"{hashlib.sha256(head).hexdigest()}"}}\n'.encode()


def body_of(folder):
    body = json.loads((newest(folder) / NAME).read_bytes())
    del body["sha256"]
    return body


def test_a_duplicated_key_with_a_right_digest(copy, capfd):
    text = json.dumps(body_of(copy))
    assert decode(sealed(text)).step == 2
    (newest(copy) / NAME).write_bytes(sealed('{"step": 2, ' + text[1:]))
    assert outcome(copy, capfd) == 1
    with pytest.raises(Damaged, match="key twice"):
        decode((newest(copy) / NAME).read_bytes())


ATTACKS = {
    "a path out": lambda b: b["files"][0].update(name="../../etc/passwd"),
    "a name with a newline": lambda b: b["files"][0].update(name="shard-00000.h5\n"),
    "another name": lambda b: b["files"][0].update(name="shard-1.h5"),
    "a negative size": lambda b: b["files"][0].update(size=-1),
    "too few checksums": lambda b: b["files"][0]["crc32"].pop(),
    "a file twice": lambda b: b["files"].append(b["files"][0]),
    "a true step": lambda b: b.update(step=True),
    "a float": lambda b: b["tensors"][0].update(shape=[50.0, 7]),
    "a huge shape": lambda b: b["tensors"][0].update(shape=[2**40, 2**40]),
    "a huge empty shape": lambda b: b["tensors"][-1].update(shape=[0, 2**61]),
    "no block": lambda b: b.update(block=0),
    "behind the end": lambda b: b["tensors"][0]["pieces"][0].update(offset=10**6),
    "shared bytes": lambda b: b["tensors"][0]["pieces"][0].update(
        offset=b["tensors"][1]["pieces"][0]["offset"]
    ),
    "no such file": lambda b: b["tensors"][0]["pieces"][0].update(file=4),
    "a hole": lambda b: b["tensors"][0]["pieces"][0].update(extent=[49, 7]),
    "twice the same": lambda b: b["tensors"][0]["pieces"].append(b["tensors"][0]["pieces"][0]),
    "outside": lambda b: b["tensors"][0]["pieces"][0].update(start=[1, 0]),
    "a name twice": lambda b: b["tensors"].append(b["tensors"][-1]),
    "a leaf in a leaf": lambda b: b["tensors"][-1].update(path=["mask", "x"]),
    "no path": lambda b: b["tensors"][0].update(path=[]),
    "a number as a key": lambda b: b["tensors"][0].update(path=[1]),
    "an object as an extra": lambda b: b["extras"][0].update(value={"__class__": "x"}),
    "another program": lambda b: b.update(format="other"),
    "no tensors": lambda b: b.pop("tensors"),
    "a list": lambda b: b.update(files={}),
}


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_a_forged_manifest_is_damage(copy, attack, capfd):
    """Names, sizes and tiling are proved although the digest is right; no array is allocated."""
    body = body_of(copy)
    ATTACKS[attack](body)
    (newest(copy) / NAME).write_bytes(sealed(body))
    assert outcome(copy, capfd) == 1


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, "{}", "[]", '{"step": NaN}', "{"])
def test_json_that_is_no_manifest(text):
    with pytest.raises(Damaged):
        decode(sealed(text))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "format version 2"),
        ({"dtype": "<f9"}, "'<f9' is not a dtype"),
        ({"dtype": "object_"}, "is not a dtype"),
        ({"dtype": "|O"}, "is not a dtype"),
    ],
)
def test_a_newer_format_is_an_error_not_a_fallback(copy, change, text):
    """Whole but not readable here: going back to an older step would be the wrong answer."""
    body = body_of(copy)
    if "dtype" in change:
        body["tensors"][0].update(change)
    else:
        body.update(change)
    (newest(copy) / NAME).write_bytes(sealed(body))
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


def test_damage_between_check_and_read_is_found(copy, monkeypatch):
    """The second reading checks again: a file that changes in between gives the older step."""
    from mpidist.checkpoint import restore as module

    original, calls = module._read, []

    def change_before_reading(path, entry, found, items, check):
        calls.append(check)
        if calls == [True, False]:
            offset = body_of(copy)["tensors"][0]["pieces"][0]["offset"]
            path = newest(copy) / "shard-00000.h5"
            data = bytearray(path.read_bytes())
            data[offset] ^= 1
            path.write_bytes(data)
        return original(path, entry, found, items, check)

    monkeypatch.setattr(module, "_read", change_before_reading)
    like = state_of(9)
    with CheckpointStore(Solo(), copy) as store:
        step, state = store.restore(like)
    assert step == 1
    assert equal(state, state_of(1))
