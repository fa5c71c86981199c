"""Engines: objects that run reductions by messages, by MPI's own calls, or in shared memory.

The module `programs` chooses the engine for the name of an algorithm. The module `executor` runs
schedules (lists of steps), `native` calls MPI's own allreduce, and four modules (`node_barrier`,
`node_short`, `staging`, `cross_copy`) reduce inside a node, through its memory. The module
`arena_sum` sums a whole arena (tensors in shared memory), `fused_pieces` sums an arena in buckets
(contiguous parts), and `piecewise` sums vectors that the caller passes one after the other.
`prepare_call` checks the arguments of a call and finds or makes its plan (the prepared operation).
"""
