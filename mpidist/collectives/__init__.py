"""Collectives as schedules: an algorithm is data, one executor runs it, one checker proves it.

Each public function is in the file of its name; `allreduce` has `iallreduce` and `plan` too. What
`plan` makes is kept for the next call, `selection` is the measured choice of ``"auto"``.
``schedules/`` are the algorithms, ``engines/`` carry them out.
"""
