"""Try with two ranks whether a rank really goes on after the death of another rank.

A launcher may accept ``--with-ft ulfm`` although its MPI library cannot survive a death. So
`mpidist launch --elastic` first starts a trial, in which one of two ranks kills itself.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence

from ..errors import ConfigError
from ..launch.environment import user_cache
from ..launch.launchers import launch_environment
from ..launch.processes import run

#: The time limit for a trial in seconds. On an idle machine a trial takes about one second.
PATIENCE = 60.0

_BEGUN, _GOES_ON = "both ranks have begun", "one rank goes on"
_PROGRAM = f"""
import os, signal, time
from mpi4py import MPI

comm = MPI.COMM_WORLD.Dup()
comm.Barrier()
if comm.rank == 1:
    comm.recv()  # else the launcher might end rank 0 before it has printed
    os.kill(os.getpid(), signal.SIGKILL)
print("{_BEGUN}", flush=True)
comm.send(None, 1)
try:
    while True:
        comm.Iprobe(MPI.ANY_SOURCE, 1)
        time.sleep(0.001)
except MPI.Exception:
    comm.Revoke()
    comm.Shrink()
    print("{_GOES_ON}", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def check_survival(words: Sequence[str], version: str) -> None:
    """Start two ranks, and let one die; raise ConfigError if the other dies, too.

    `words` is the command line of the launcher for two ranks, up to the program.
    """
    folder, known = user_cache(), [version, *words]
    note = folder and folder / "survives-a-death.json"
    if note:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(note.read_text(encoding="utf-8")) == known:
                return
    trial = [*words, sys.executable, "-c", _PROGRAM]
    done = run(trial, env=launch_environment(), timeout=PATIENCE)
    if _GOES_ON in done.stdout:
        if note:
            with contextlib.suppress(OSError):
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(json.dumps(known), encoding="utf-8")
    elif _BEGUN in done.stdout:
        lines = done.stderr.split("\n")
        said = next((line.strip() for line in lines if line.strip(" -*")), "nothing")
        raise ConfigError(
            "mpidist launch --elastic: in a trial with 2 ranks, one was killed and the other one "
            f"did not go on ({' '.join(words)}, which printed: {said[:200]}); expected an MPI with "
            "ULFM. The same command without --elastic works: it starts the job again from the "
            "newest checkpoint"
        )
