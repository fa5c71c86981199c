"""LibSVM files are read as by scikit-learn; a line that it refuses is one bad record (R42)."""

import bz2
import gzip
import importlib
import io
import re
import warnings
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import data
from mpidist.data.skip_bad import BadRecordFilter
from mpidist.errors import BadRecord, ConfigError

#: Lines that are read, each alone.
GOOD = [
    b"1 1:2", b"1 1:2 # c 4:5", b"1 1:2#c", b"1#c", b"1 # c", b"2", b"1\t1:2\t3:4\r", b" 1 1:1  ",
    b"1e2 1:1e-3 2:1E+5", b"+1 1:+2 2:.5 3:5.", b"-1 1:-2 2:-0.0", b"1 1:inf 2:-Inf 3:nan",
    b"1 1:infinity 2:NAN", b"nan 1:1", b"inf 1:2", b"1 1:1e400", b"1 1:1e39", b"1 0:0 1:0",
    b"1 +1:1", b"1 01:2", b"1 1_0:1_0", b"1_0 1:1", b"1 2147483646:1", b"1 qid:3 1:2", b"1 qid:5",
    b"1 qid:x 1:2", b"1 qid:3.0 1:1", b"1 qidx:3 1:1", b"1 1:2\x0c3:4", b"1 1:2\x0b",
    b"1 1:1 #\xff\xfe", b"1 1:0.1234567890123456789 2:16777217 3:1e-46",
]  # fmt: skip
#: Lines that scikit-learn refuses.
BAD = [
    b"1 3:1 2:1", b"1 2:1 2:5", b"x 1:1", b"1 -1:1", b"1 0x1:1", b"1 1:0x10", b"1 1:", b"1 1: 2",
    b"1 :2", b"1 1", b"1 1:2:3", b"1:2 3:4", b"1,2 1:3", b"1 1:3 qid:3 2:2", b"1 qid:3 qid:4 1:1",
    b"1 1.0:2", b"1 1:1d5", b"1 99999999999999999999:1", b"1 2147483648:1", b"1 9999999999:1",
    b"\xef\xbb\xbf1 1:1", b"1 1:2\r3 4:5", b"1 1:\xff", b"1 1:1\x00", b"1\xc2\xa01:1", b"1 Qid:3",
    b"1 1:--2", b"1 1 :2", b"1 1:1\x1c2:2", b"1 1:1\x85", b"1 qid 1:1", b"1 1:2:3 4", b"1 1 2:3:4",
    b"1 1::2 3", b"1 5:1 6:1 1:1", b"\x00#", b"1 " + b"9" * 5000 + b":1",
]  # fmt: skip
#: Lines that are no record.
NONE = [b"", b"   ", b"\t", b"# 1 1:2", b"  # x", b"\r", b"\x0b"]
MULTILABEL = [
    b"1,2 1:3", b"1:2 3:4", b" 1:2 3:4", b"1 1:1", b"2,1 3:4", b"qid:3 1:2", b"1,2", b"1,1 2:2",
    b"1.5,2 1:3", b"nan,inf 2:2", b"1,2 qid:4 1:3", b"3,1,2",
]  # fmt: skip
BAD_MULTILABEL = [b"1, 2 1:3", b",1 1:1", b"1, 1:3", b"1,x 1:1", b",", b",2:3", b"1,,2 1:3"]


@cache
def sklearn_datasets():
    """Its import takes a second, which only the tests that need it shall pay for."""
    return importlib.import_module("sklearn.datasets")


def theirs(text, **options):
    """What scikit-learn says of a file, as ((starts, columns, values), labels, queries)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, labels, *queries = sklearn_datasets().load_svmlight_file(
            io.BytesIO(text), dtype="f4", **options
        )
    return x, labels, *queries


@pytest.fixture
def read(tmp_path):
    def read(text, **options):
        (tmp_path / "a").write_bytes(text)
        return data.LibSVM(tmp_path / "a", **options)

    return read


def same(source, text, **options):
    """Whether a source without bad records is what scikit-learn reads."""
    x, labels, *queries = theirs(text, **options)
    starts, columns, values = source.rows(np.arange(len(source)))
    np.testing.assert_array_equal(starts, x.indptr)
    np.testing.assert_array_equal(columns, x.indices)
    np.testing.assert_array_equal(values.view("u4"), x.data.view("u4"))
    assert source.features == x.shape[1]
    if options.get("multilabel"):
        ours = np.split(source.labels, source.label_starts[1:-1]) if len(labels) else []
        np.testing.assert_equal([tuple(some.tolist()) for some in ours], labels)
    else:
        np.testing.assert_array_equal(source.labels, labels)
    for ours, right in zip([source.queries], queries, strict=False):
        np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize(
    ("good", "bad", "multilabel"), [(GOOD, BAD, False), (MULTILABEL, BAD_MULTILABEL, True)]
)
def test_odd_lines(read, good, bad, multilabel):
    """Each alone, and all in one file: the good ones are what they are, the bad ones are told."""
    for line in good:
        for zero_based in ("auto", True):
            options = {"zero_based": zero_based, "multilabel": multilabel}
            same(read(line, **options), line, **options)
    for line in bad:
        with pytest.raises((ValueError, OverflowError)):
            theirs(line, multilabel=multilabel)
        source = read(line + b"\n", multilabel=multilabel)
        with pytest.raises(BadRecord, match="record 0: line 1: "):
            source.take([0])
        assert len(source) == 1
        assert source.features == 1
    lines = [line for some in zip(*[(good * 9)[:40], (bad * 9)[:40], (NONE * 9)[:40]], strict=True)
             for line in some]  # fmt: skip
    source = read(b"\n".join(lines), multilabel=multilabel, features=2**31)
    records = [line for line in lines if line not in NONE]
    assert len(source) == len(records)
    assert sorted(source._bad) == [k for k, line in enumerate(records) if line in bad]
    for k, line in enumerate(records):
        number = [i for i, other in enumerate(lines, 1) if other == line]
        if line in good:
            x = theirs(line, multilabel=multilabel, zero_based=source.zero_based)[0]
            np.testing.assert_array_equal(source.rows([k])[1], x.indices)
            np.testing.assert_array_equal(source.rows([k])[2], x.data)
        else:
            assert any(source._bad[k].startswith(f"line {n}: ") for n in number)


def test_what_is_no_record(read):
    """Empty files, comments and empty lines; the last line may lack its end."""
    for text in (b"", b"\n", b"# only\n", b"\n".join(NONE), b"\n# x\n1 1:2\n\n", b"1 1:2\n2 2:3"):
        same(read(text), text)
    assert len(read(b"")) == 0
    assert read(b"").take([])[0].shape == (0, 1)


def test_columns_from_one_or_from_zero(read, tmp_path):
    """Also of two files together, as `load_svmlight_files` has it."""
    one, zero, bad = b"1 1:1 5:2\n0 3:1\n", b"1 0:7 2:1\n", b"1 0:5 3:x\n"
    for text in (one, zero):
        for zero_based in ("auto", True, False) if text == one else ("auto", True):
            same(read(text, zero_based=zero_based), text, zero_based=zero_based)
    with pytest.raises(BadRecord, match="line 1: column 0 is below 1"):
        read(zero, zero_based=False).rows([0])
    assert not read(one + bad).zero_based, "of the records that can be read"
    assert read(one, features=5)._bad == {}
    for wrong in (-2, 2):
        with pytest.raises(ConfigError, match=f"sample {wrong} of 2; samples are numbered from 0"):
            read(one).take([0, wrong])
    with pytest.raises(BadRecord, match="column 5 is beyond the 4 features"):
        read(one, features=4).take([0])
    with pytest.raises(ConfigError, match="zero_based is 'one', expected true, false or 'auto'"):
        read(one, zero_based="one")
    for first, second in [(one, one), (one, zero), (zero, one), (zero, zero), (one, b"1\n")]:
        paths = []
        for name, text in (("train", first), ("test", second)):
            (tmp_path / name).write_bytes(text)
            paths.append(str(tmp_path / name))
        ours = data.from_settings("libsvm", {"path": paths[0], "test_path": paths[1]})
        expected = sklearn_datasets().load_svmlight_files(paths)
        for source, x in zip(ours, expected[::2], strict=True):
            np.testing.assert_array_equal(source.rows(range(len(source)))[1], x.indices)
            assert source.features == x.shape[1]


def test_queries(read):
    text = b"1 qid:3 1:2\n2 qid:-3 1:3 # x\n0 qid:9223372036854775807\n1 qid:1_0 1:1\n"
    source = read(text, query_id=True)
    same(source, text, query_id=True)
    dense, queries, labels = source.take([1, 0])
    assert (queries.tolist(), labels.tolist(), len(dense)) == ([-3, 3], [2, 1], 2)
    assert read(text).queries is None
    assert len(read(text).take([0])) == 2
    source = read(b"1 1:2\n1 qid:x 1:2\n1 qid:99999999999999999999\n1 qid:4 1:1\n", query_id=True)
    assert sorted(source._bad) == [0, 1, 2]
    assert "line 1: it has no qid" in source._bad[0]
    assert source.take([3])[1].tolist() == [4]


def test_many_labels(read):
    """0 or 1 for each class, as the model `tagger` takes them."""
    source = read(b"3,1 1:2\n1:5\n# x\n7 2:1\nx 2:1\n-2,5 2:1 1:1\n", multilabel=True)
    assert source.classes.tolist() == [1, 3, 7], "not those of bad records"
    taken = BadRecordFilter(source).take(np.arange(5))
    assert [record.index for record in taken.bad] == [3, 4]
    dense, labels = taken.batch
    assert (labels.dtype, labels.tolist()) == (np.uint8, [[1, 1, 0], [0, 0, 0], [0, 0, 1]])
    np.testing.assert_array_equal(dense, [[2, 0], [5, 0], [0, 1]])
    given = read(b"3,1 1:2\n3,nan 1:5\n", multilabel=True, classes=[3, 9])
    for index, label in ((0, "1"), (1, "nan")):
        with pytest.raises(BadRecord, match=f"record {index}: its label {label} is unknown"):
            given.take([index])
    with pytest.raises(BadRecord, match="its label inf is unknown"):
        read(b"inf 1:1\n", classes=[0, 1]).take([0])


def test_many_labels_of_a_job(tmp_path):
    for name, text in (("train", "3,1 1:2\n7\n"), ("test", "7,1 2:2\n5 1:1\n")):
        (tmp_path / name).write_text(text)
    paths = {"path": str(tmp_path / "train"), "test_path": str(tmp_path / "test")}
    train, test = data.from_settings("libsvm", {**paths, "multilabel": True, "zero_based": False})
    assert train.take([0, 1])[1].tolist() == [[1, 1, 0], [0, 0, 1]]
    taken = BadRecordFilter(test).take(np.arange(2))
    assert taken.batch[1].tolist() == [[1, 0, 1]]
    assert "its label 5 is unknown" in taken.bad[0].reason


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("zero_based", [False, True])
def test_files_that_scikit_learn_writes(read, multilabel, zero_based):
    """Generated data, with a comment at the top and query numbers, through its own writer."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((200, 40)) * (rng.random((200, 40)) < 0.2)
    x *= 10.0 ** rng.integers(-9, 9, x.shape)
    y = rng.integers(0, 2, (200, 7)) if multilabel else rng.standard_normal(200)
    file = io.BytesIO()
    sklearn_datasets().dump_svmlight_file(
        x, y, file, zero_based=zero_based, comment="a\ntest", multilabel=multilabel,
        query_id=rng.integers(0, 9, 200),
    )  # fmt: skip
    options = {"multilabel": multilabel, "zero_based": zero_based, "query_id": True}
    same(read(file.getvalue(), **options), file.getvalue(), **options)


WORDS = st.sampled_from(
    b"1 -1 2.5 1,2 , 1:2 2:3 3:4e-1 9:1 0:1 2:nan 4:x 1: :1 : 1:2:3 qid:1 qid #c # 5 1e3:1 5_0:1 "
    b"+6:-1e-3 7:.5 inf".split()
)
LINES = st.lists(WORDS, max_size=5).map(b" ".join) | st.binary(max_size=6).filter(
    lambda line: b"\n" not in line
)


@pytest.mark.parametrize("multilabel", [False, True])
@given(lines=st.lists(LINES, max_size=6), end=st.sampled_from([b"\n", b"\r\n", b" \n"]))
def test_any_lines(tmp_path_factory, multilabel, lines, end):
    """Each line is read, left out or refused as scikit-learn does with a file of it alone."""
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(end.join(lines))
    options = {"zero_based": True, "multilabel": multilabel}
    source, found = data.LibSVM(path, **options), 0
    good = []
    for line in lines:
        try:
            x = theirs(line, **options)[0]
        except (ValueError, OverflowError):
            assert found in source._bad
            found += 1
            continue
        good.append(line)
        if x.shape[0]:
            np.testing.assert_array_equal(source.rows([found])[1], x.indices)
            np.testing.assert_array_equal(source.rows([found])[2], x.data)
            found += 1
    assert len(source) == found
    path.write_bytes(end.join(good))
    options["zero_based"] = "auto"
    same(data.LibSVM(path, **options), end.join(good), **options)


def outcome(path):
    """How many records a file has, or what is said of it."""
    try:
        return len(data.LibSVM(path))
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("module", [gzip, bz2])
def test_compressed(tmp_path, module):
    """Whole it is the file itself, several streams one after the other too; else one line."""
    text = b"".join(b"%d %d:%d\n" % (k % 2, k + 1, k) for k in range(3000))
    half, path = text.index(b"\n", 999) + 1, tmp_path / "a"
    packed = module.compress(text[:half]) + module.compress(text[half:])
    path.write_bytes(packed)
    same(data.LibSVM(path), text)
    path.write_bytes(module.compress(b""))
    assert len(data.LibSVM(path)) == 0
    rng = np.random.default_rng(0)
    for k in range(60):
        broken = bytearray(packed[: rng.integers(11, len(packed))] if k % 2 else packed)
        if not k % 2:
            broken[rng.integers(4, len(broken))] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        said = outcome(path)
        # A bit that means nothing, or a cut between the two streams.
        assert said in (3000, text[:half].count(b"\n")) or re.fullmatch(
            r"libsvm: .*: damaged or truncated gzip or bzip2 \(.*\); fetch it again", said
        )
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        data.LibSVM(tmp_path)
