"""Bytes at which something changes: how an MPI library sends, and which schedule is the faster one.

Measured, see docs/benchmarks.md; the simulator counts with the same numbers.
"""

#: Messages up to this many bytes are sent at once; longer ones wait for the receiver's answer.
#: Open MPI calls it btl_tcp_min_rdma_pipeline_size.
LONG = 192 << 10

#: Open MPI's TCP sends what is below 64 KiB eagerly.
EAGER_BYTES = 60 << 10

#: Below this many bytes `butterfly` is recursive doubling.
SHORT = 8192

#: Lanes of more bytes run a ring, whose segments overlap the wire and the sum; shorter ones a
#: butterfly, which needs fewer messages.
RING_BYTES = 256 << 10
