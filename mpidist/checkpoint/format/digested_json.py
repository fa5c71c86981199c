"""One line of JSON that ends in its own SHA-256: what manifests and tables are made of.

The digest is checked before the JSON is parsed, and every value is proved to be of its kind before
it is used: sizes are integers in a range, lists are lists, a key stands once.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager

from ...errors import CheckpointError
from .state import MAX_DEPTH, Path, Unreadable

#: Sizes and offsets stay below this, so that sums of them are exact everywhere.
BIG = 1 << 62


class Damaged(CheckpointError):
    """What is on disk is not what was written. Raised by readers; the store then looks further."""


def encode_digested(body: dict, last: str, more: str = "") -> bytes:
    """Return `body` as a line of JSON with the digest under the name `last` behind it.

    `more` is what the body holds besides, as JSON that begins with a comma.
    """
    head = (json.dumps(body, separators=(",", ":"), allow_nan=False)[:-1] + more).encode()
    return head + f',"{last}":"{hashlib.sha256(head).hexdigest()}"}}\n'.encode()


def decode_digested(data: bytes, name: str, last: str) -> dict:
    """Return what `encode_digested` was given. Raises Damaged; `name` says of what file."""
    tail = len(f',"{last}":""}}\n') + 64
    head = data[:-tail]
    digest = hashlib.sha256(head).hexdigest()
    if len(data) <= tail or data[-tail:] != f',"{last}":"{digest}"}}\n'.encode():
        raise Damaged(f"{name} fails its own digest ({len(data)} bytes)")
    with as_damage(name):
        body = json.loads(
            head + b"}", object_pairs_hook=_no_duplicates, parse_constant=_no_constants
        )
    if not isinstance(body, dict):
        raise Damaged(f"{name} is of another program")
    return body


@contextmanager
def as_damage(name: str):
    """Make what JSON of another form raises damage of the file `name`."""
    try:
        yield
    except (Damaged, Unreadable):
        raise
    except (ValueError, KeyError, TypeError, RecursionError, CheckpointError) as error:
        raise Damaged(f"{name} is not one that mpidist wrote: {error}") from error


def _no_duplicates(pairs: list) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Damaged(f"a manifest holds a key twice: {sorted(key for key, _ in pairs)[:8]}")
    return found


def _no_constants(word: str):
    raise Damaged(f"a manifest holds {word}, which is not JSON")


def list_of(value) -> list:
    """Return `value`, a list. Raises Damaged, as the others."""
    if not isinstance(value, list):
        raise Damaged(f"expected a list, got {type(value).__name__}")
    return value


def integer_of(value, least: int = 0) -> int:
    """Return `value`, an integer from `least`."""
    if type(value) is not int or not least <= value < BIG:
        raise Damaged(f"expected an integer of {least} or more, got {str(value)[:40]}")
    return value


def integers_of(values) -> tuple[int, ...]:
    """Return `values`, a list of integers from 0, as a tuple."""
    return tuple(integer_of(value) for value in list_of(values))


def path_of(value) -> Path:
    """Return `value`, a list of keys, as a path."""
    if not list_of(value) or len(value) > MAX_DEPTH or not all(isinstance(k, str) for k in value):
        raise Damaged(f"{str(value)[:60]} is not a path of keys")
    return tuple(value)
