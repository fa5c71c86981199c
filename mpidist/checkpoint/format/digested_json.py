"""Encode and decode a line of JSON that ends with the SHA-256 of the bytes before it."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager

from ...errors import CheckpointError
from .state import MAX_DEPTH, Path, Unreadable

#: All sizes and offsets in a checkpoint are smaller than this number, so that sums of them fit in
#: 64 bits.
BIG = 1 << 62


class Damaged(CheckpointError):
    """A file of a checkpoint is missing, or differs from what was written."""


def encode_digested(body: dict, last: str, more: str = "") -> bytes:
    """Return `body` as one line of JSON that ends with the SHA-256 of the bytes before it.

    `last` is the key of the SHA-256; `more` is text such as ``,"k":1``, inserted before that key.
    """
    head = (json.dumps(body, separators=(",", ":"), allow_nan=False)[:-1] + more).encode()
    return head + f',"{last}":"{hashlib.sha256(head).hexdigest()}"}}\n'.encode()


def decode_digested(data: bytes, name: str, last: str) -> dict:
    """Check the SHA-256 in a line of JSON, and return the dict. Raises Damaged."""
    tail = len(f',"{last}":""}}\n') + 64
    head = data[:-tail]
    digest = hashlib.sha256(head).hexdigest()
    if len(data) <= tail or data[-tail:] != f',"{last}":"{digest}"}}\n'.encode():
        raise Damaged(f"{name} fails its own digest ({len(data)} bytes)")
    with as_damage(name):
        body = json.loads(head + b"}", object_pairs_hook=_checked, parse_constant=_refuse)
    if not isinstance(body, dict):
        raise Damaged(f"{name} was written by another program")
    return body


@contextmanager
def as_damage(name: str):
    """In a ``with`` block, turn exceptions that unexpected JSON causes into `Damaged`."""
    try:
        yield
    except (Damaged, Unreadable):
        raise
    except (ValueError, KeyError, TypeError, RecursionError, CheckpointError) as error:
        raise Damaged(f"{name} is not one that mpidist wrote: {error}") from error


def _checked(pairs: list) -> dict:
    """Return the (key, value) `pairs` of a JSON object as a dict."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Damaged(f"a manifest holds a key twice: {sorted(key for key, _ in pairs)[:8]}")
    return found


def _refuse(word: str):
    """Raise Damaged for NaN and infinity, which Python's JSON parser would accept."""
    raise Damaged(f"a manifest holds {word}, which is not JSON")


def list_of(value) -> list:
    """Return `value` if it is a list; otherwise raise Damaged."""
    if not isinstance(value, list):
        raise Damaged(f"expected a list, got {type(value).__name__}")
    return value


def integer_of(value, least: int = 0) -> int:
    """Return `value` if it is an integer from `least` to 2**62 - 1; otherwise raise Damaged."""
    if type(value) is not int or not least <= value < BIG:
        raise Damaged(f"expected an integer of {least} or more, got {str(value)[:40]}")
    return value


def integers_of(values) -> tuple[int, ...]:
    """Return a list of integers as a tuple; raise Damaged if `values` is anything else."""
    return tuple(integer_of(value) for value in list_of(values))


def path_of(value) -> Path:
    """Return `value`, a list of dict keys, as a tuple; raise Damaged if it is anything else."""
    if not list_of(value) or len(value) > MAX_DEPTH or not all(isinstance(k, str) for k in value):
        raise Damaged(f"{str(value)[:60]} is not a path of keys")
    return tuple(value)
