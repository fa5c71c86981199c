"""Signatures and statuses: equal operations have equal encodings, also if they are long (R97)."""

from mpidist.runtime.agreement.mismatch import (
    STATUS_BYTES,
    WAITING,
    Signature,
    Status,
    conflict,
    encode_signature,
)


def status(rank, extra):
    signature = Signature("allgather", "float32", "(*, ())", "", "ring", extra)
    sent = Status(rank, WAITING, 7, encode_signature(signature), f"n{rank:04d}", "train.py:31")
    return Status.unpack(sent.pack()), sent


def test_a_long_signature_survives_its_status():
    """The counts of 200 ranks do not fit into a status; a late rank must not be accused."""
    counts = f"counts={tuple(range(100_000, 100_200))}"
    received, sent = status(3, counts)
    assert len(sent.pack()) == STATUS_BYTES
    assert received == sent
    assert conflict([received, status(0, counts)[0]]) is None


def test_long_signatures_that_differ_at_the_end_differ():
    longer = list(range(100_000, 100_200))
    one = status(0, f"counts={tuple(longer)}")[0]
    longer[-1] += 1
    other = status(1, f"counts={tuple(longer)}")[0]
    text = conflict([one, other])
    assert text.startswith("allgather #7: rank 0 counts=")
    assert "(n0001, train.py:31)" in text
