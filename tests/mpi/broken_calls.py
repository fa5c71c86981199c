"""Raise an exception on one rank at each line of a call on a node, and check the other ranks."""

import contextlib
import time

import numpy as np

from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.errors import MismatchError, MpidistError
from mpidist.runtime.agreement.statuses import Statuses
from mpidist.runtime.context import of

METHODS = (
    "stage", "add", "publish", "fetch", "prepare", "compute", "_compute", "run",
)  # fmt: skip


class TimeLimit(BaseException):
    """A program's own."""


ERRORS = (KeyboardInterrupt, MemoryError, TimeLimit)


class Trap:
    """Counts the points that a rank passes, two for each call, and raises at number `at`."""

    def __init__(self, patch):
        self.patch, self.passed, self.at = patch, 0, None

    def point(self):
        """One point."""
        self.passed += 1
        if self.passed == self.at:
            raise ERRORS[self.at % 3](f"at point {self.at}")

    def wrap(self, owner, name):
        """Put a point before and one behind each call of ``owner.name``."""
        call = getattr(owner, name)

        def wrapped(*args, **kwargs):
            self.point()
            result = call(*args, **kwargs)
            self.point()
            return result

        self.patch.setattr(owner, name, wrapped)

    def wrap_program(self, program):
        """All that a program does."""
        for name in METHODS:
            if hasattr(program, name):
                self.wrap(program, name)
        if hasattr(program, "ufunc"):
            self.patch.setattr(program, "ufunc", Sum(program.ufunc, self))
        if hasattr(program, "staged"):
            self.wrap_program(program.staged)


class Sum:
    """A ufunc with points around it."""

    def __init__(self, ufunc, trap):
        self.ufunc, self.trap = ufunc, trap

    def __call__(self, *args, **kwargs):
        self.trap.point()
        result = self.ufunc(*args, **kwargs)
        self.trap.point()
        return result

    def reduce(self, *args, **kwargs):
        """As of a ufunc."""
        self.trap.point()
        result = self.ufunc.reduce(*args, **kwargs)
        self.trap.point()
        return result


def heal(comm):
    """Make the communicator as new, so that a thousand cases need one. Collective."""
    context, gate = of(comm), memory_of(of(comm)).gate
    statuses = context.statuses
    statuses.closing = True
    comm.Barrier()  # nobody says anything any more
    while len(set(comm.allreduce(np.array([statuses.said, statuses.heard])))) > 1:
        with contextlib.suppress(MismatchError):
            statuses.listen()
    context.statuses = Statuses(context)
    context.failed, context.caller = None, None
    context.stopped = context.under_way = context.unconfirmed = False
    context.begun += max(comm.allgather(context.sequence)) - context.sequence
    context.history.clear()
    gate.lines[gate.mine] = gate.count = 0
    comm.Barrier()


class Problem:
    """One call: ``run(x)`` on values whose sum shows whether it is whole."""

    def __init__(self, comm, call, n, vector=None):
        self.comm, self.call, self.n = comm, call, n
        self.x = np.empty(n) if vector is None else vector
        self.expected = sum(1000.0**r for r in range(comm.size)) / comm.size

    def outcome(self):
        """Return "whole" or the exception; a result that is not whole fails."""
        self.x[...] = 1000.0**self.comm.rank
        try:
            self.call(self.x)
        except (*ERRORS, MpidistError) as error:
            return error
        assert np.allclose(self.x, self.expected, rtol=1e-12), "a result that is not whole"
        return "whole"


def check_case(problem, victim, trap, at):
    """Raise at point `at` on `victim`, then call twice more."""
    comm = problem.comm
    trap.passed, trap.at = 0, at if comm.rank == victim else None
    start = time.monotonic()
    first = problem.outcome()
    trap.at = None
    if comm.rank == victim:
        assert isinstance(first, ERRORS), first
    else:
        assert first == "whole" or isinstance(first, MismatchError), first
    for _ in range(2):
        # Nobody works on while another has failed.
        others = comm.allgather(str(problem.outcome())[:200])
        assert len({other == "whole" for other in others}) == 1, others
        if others[0] != "whole":
            assert all("broken off" in other for other in others), others
            assert all(f"rank {victim} of {comm.size}" in other for other in others), others
    assert time.monotonic() - start < 20


def check_all(problem, trap, heal=heal):
    """Raise at every point of a call in turn, on one rank after the other."""
    comm = problem.comm
    assert problem.outcome() == "whole"
    trap.passed = 0
    assert problem.outcome() == "whole"
    points = comm.bcast(trap.passed)
    assert points >= 4
    for at in range(1, points + 1):
        victim = at % comm.size
        # Ranks do not all pass as many: those that own no part add nothing.
        if comm.bcast(trap.passed, root=victim) < at:
            continue
        check_case(problem, victim, trap, at)
        heal(comm)
        trap.passed = 0
        assert problem.outcome() == "whole"
    return points
