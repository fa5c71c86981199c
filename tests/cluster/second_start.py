"""Start a job again if Open MPI itself has crashed at its start."""

import warnings
from functools import wraps


def died_in_mpi_init(done) -> bool:
    """Whether Open MPI 5 lost the race of its own start (open-mpi/ompi#12495).

    Its ranks leave the last fence of MPI_Init one by one, and know MPI_COMM_WORLD only after it: a
    message of a rank that is out already ends one that is still in there.
    """
    said = done.output if hasattr(done, "output") else done.stdout + done.stderr
    return "mca_pml_ob1_recv_frag_callback_match" in said and "ompi_mpi_init" in said


def once_more(call):
    """The same call, made a second time where the first died in Open MPI's start."""

    @wraps(call)
    def calling(*args, **options):
        done = call(*args, **options)
        if died_in_mpi_init(done):
            warnings.warn(f"Open MPI died in MPI_Init, tried again: {args}", stacklevel=2)
            done = call(*args, **options)
        return done

    return calling
