"""Lengths in bytes at which MPI changes its protocol, or at which another algorithm is faster."""

#: Messages up to this many bytes are sent at once; longer ones wait for the receiver's answer. In
#: Open MPI, this length is the parameter btl_tcp_min_rdma_pipeline_size.
LONG = 192 << 10

#: Over TCP, Open MPI sends messages below 64 KiB without waiting for the receiver's answer.
EAGER_BYTES = 60 << 10

#: Vectors below this many bytes use recursive doubling in `butterfly`.
SHORT = 8192

#: In `hierarchical`, a lane (the exchange of one part between nodes) of more bytes runs a ring,
#: which adds one segment while the next is on the wire. A shorter lane runs a butterfly, which
#: needs fewer messages.
RING_BYTES = 256 << 10
