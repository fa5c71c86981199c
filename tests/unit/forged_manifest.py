"""Write manifests and tables with wrong contents but right digests, for tests of the readers."""

import hashlib
import json

import numpy as np

from mpidist.checkpoint.format.decode import decode
from mpidist.checkpoint.format.manifest import NAME


def newest(folder):
    return folder / "step-000000000002"


def sealed(body, last="sha256"):
    """A manifest or table with this body and a digest that is right."""
    head = (body if isinstance(body, str) else json.dumps(body))[:-1].encode()
    return head + f',"{last}":"{hashlib.sha256(head).hexdigest()}"}}\n'.encode()


TABLE = "shard-00000.table"
#: Columns of the pieces in a table: tensor, offset, whether it is a flat range, start, extent.
TENSOR, OFFSET, START = 0, 1, 3


def body_of(folder, name=NAME):
    """What a manifest or a table says; the pieces of a table are rows of numbers."""
    head, rest = (newest(folder) / name).read_bytes().split(b"\n", 1)
    body = json.loads(head)
    del body["sha256" if name == NAME else "digest"]
    if name != NAME:
        body["rows"] = np.frombuffer(rest, "<i8").reshape(body["pieces"], -1).tolist()
    return body


def table_of(body):
    """The bytes of a table with this body, all digests right."""
    body = dict(body)
    data = np.array(body.pop("rows"), "<i8").tobytes()
    body.update(bytes=len(data), numbers=hashlib.sha256(data).hexdigest())
    return sealed(body, "digest") + data


def forge(folder, body, table=None):
    """Write a manifest, and its first table, whose digests are right."""
    if table is not None:
        data = table if isinstance(table, bytes) else table_of(table)
        (newest(folder) / TABLE).write_bytes(data)
        head = data[: data.index(b"\n") + 1]
        body["tables"][0].update(size=len(data), sha256=hashlib.sha256(head).hexdigest())
    (newest(folder) / NAME).write_bytes(sealed(body))


def decoded(folder):
    """Read the newest step as a reader does, but for the folder."""
    return decode((newest(folder) / NAME).read_bytes(), [(newest(folder) / TABLE).read_bytes()])


def put(row, column, value):
    """Change one number of a piece."""

    def change(b, t):
        t["rows"][row][column] = value

    return change


def swap_pieces(b, t):
    one, two = t["rows"][:2]
    one[TENSOR], two[TENSOR] = two[TENSOR], one[TENSOR]
