"""The shaped network is what it says, and the ring fills it."""

import json
import re
import statistics

import pytest

from mpidist.testing.launch import find_launcher

pytestmark = pytest.mark.network

MIB = 1 << 20
BYTES = 16 * MIB
#: What each of 4 hosts sends in a ring allreduce of BYTES: 2(p-1)/p.
RING_BYTES = 2 * 3 * BYTES // 4


def timed(net, python, program, repeats, *algorithms):
    """Run ring_time.py; return algorithm -> seconds of each repeat."""
    done = net.mpirun(
        1,
        [python, program, str(BYTES), str(repeats), *algorithms],
        mpi=find_launcher(python),
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        timeout=100,
    )
    rows = [json.loads(line) for line in done.check().stdout.splitlines()]
    assert [row["algorithm"] for row in rows] == list(algorithms)
    return {row["algorithm"]: row["seconds"] for row in rows}


def test_ranks_are_on_hosts_of_their_own(net, openmpi, programs):
    done = net.mpirun(2, [openmpi, programs / "who.py"], mpi=find_launcher(openmpi))
    found = re.findall(r"rank (\d) of 8 sum 28 on (h\d)", done.check().stdout)
    assert dict(found) == {str(rank): f"h{rank // 2 + 1}" for rank in range(8)}


def test_stream_runs_at_the_rate_of_the_link(net):
    seconds = [net.stream(RING_BYTES) for _ in range(3)]
    wire = RING_BYTES * 8 / 1e9
    # Headers cost 4.4 %; a full token bucket of 1 MB gives 8 ms; a busy machine may be slower.
    assert wire / 1.05 < min(seconds) < wire * 1.5


def test_ring_sends_the_bytes_of_the_formula(net, openmpi, programs):
    """R38: 2(p-1)/p * N bytes leave each host, counted by the network device."""
    repeats = 4
    before = [net.bytes_sent(host) for host in range(1, 5)]
    timed(net, openmpi, programs / "ring_time.py", repeats, "ring")
    sent = [net.bytes_sent(host) - b for host, b in zip(range(1, 5), before, strict=True)]
    for each in sent:
        # One repeat more for the warm-up; TCP/IP headers, acknowledgements, start and end of MPI.
        assert 1.0 < each / (RING_BYTES * (repeats + 1)) < 1.10, sent


def test_ring_against_a_plain_tcp_stream(net, openmpi, programs):
    """R38: a ring allreduce of 16 MiB takes at most 1/0.90 of plain TCP's time for its bytes."""
    ratios = []
    # Other work on the machine can only lower the ratio, so the best of three attempts counts.
    for _ in range(3):
        streams = [net.stream(RING_BYTES)]
        ours = timed(net, openmpi, programs / "ring_time.py", 7, "ring")["ring"]
        streams.append(net.stream(RING_BYTES))
        ratios.append(statistics.mean(streams) / statistics.median(ours))
        print(f"\nplain TCP {statistics.mean(streams) * 1e3:.0f} ms, ring "
              f"{statistics.median(ours) * 1e3:.0f} ms, ratio {ratios[-1]:.3f}")  # fmt: skip
        if ratios[-1] >= 0.90:
            return
    pytest.fail(f"stream / ring = {[round(r, 3) for r in ratios]}, expected at least 0.90")
