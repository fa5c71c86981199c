"""The collectives: most algorithms are lists of steps, which one executor runs on every rank.

Each public function is in the module of the same name, but `iallreduce` and `plan` are in the
module `allreduce`. The module `plan` makes plans (prepared operations) and keeps them for later
calls. For ``algorithm="auto"``, the module `selection` measures which algorithm is the fastest.
The folder ``schedules/`` contains the algorithms, and ``engines/`` contains the code that runs
them.
"""
