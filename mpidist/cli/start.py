"""The common first part of commands on several ranks: initialise MPI, and check the launch."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

from ..errors import described
from ..launch import start_checks


def start_ranks(environ: MutableMapping[str, str]):
    """Return the communicator of all ranks. Collective; `environ` is ``os.environ``.

    From now on, an exception that a rank does not catch ends the whole job. Raises ConfigError on
    all ranks if the launch cannot work.
    """
    comm = start_checks.initialize(environ).COMM_WORLD
    problem = None
    try:
        from ..runtime import failure
    except Exception as error:
        problem = described(error)
        if comm.rank == 0:
            print(f"mpidist: error: {problem}", file=sys.stderr, flush=True)
    start_checks.check_launch(comm, environ, problem=problem)
    failure.install_hook(comm)
    return comm
