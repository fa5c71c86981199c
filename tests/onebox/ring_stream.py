"""One host's part of a plain TCP stream around a ring, for `ShapedNetwork.stream`.

Run as ``python ring_stream.py MY_ADDRESS NEXT_ADDRESS HOSTS BYTES REPEATS``; prints a JSON list
with the seconds of each repeat. The program uses no MPI and imports no package, because it is
started once on each host.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

_PORT = 7000


def main(here: str, there: str, hosts: int, size: int, repeats: int) -> list[float]:
    """Send `size` bytes to the next host while receiving as many, `repeats` times. Local."""
    server = socket.create_server((here, _PORT))
    outgoing = _connect(there)
    incoming, _ = server.accept()
    outgoing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data, space = bytes(1 << 20), bytearray(1 << 20)
    seconds = []
    for _ in range(repeats):
        # A byte once around from every host: when the last has come, all hosts are here.
        for _ in range(hosts):
            outgoing.sendall(b"x")
            incoming.recv(1)
        start = time.perf_counter()
        sender = threading.Thread(target=_send, args=(outgoing, data, size))
        sender.start()
        left = size
        while left:
            got = incoming.recv_into(space, min(left, len(space)))
            if not got:
                raise ConnectionError(f"{here}: the previous host closed with {left} bytes to go")
            left -= got
        sender.join()
        seconds.append(time.perf_counter() - start)
    return seconds


def _connect(there: str) -> socket.socket:
    # The next host's process may not listen yet.
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((there, _PORT))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _send(link: socket.socket, data: bytes, size: int) -> None:
    view = memoryview(data)
    while size:
        size -= link.send(view[: min(size, len(view))])


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))
