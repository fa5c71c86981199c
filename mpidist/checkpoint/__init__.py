"""Save and load checkpoints of a training job.

A checkpoint is called a step: the state of the job after that training step. A saved step is always
complete, because a failed save leaves no part of a step. Any number of ranks can load a step,
whatever number of ranks saved it.

Module `store` has the public class `CheckpointStore`. Module `tiered` has `TieredStore`, which
saves a copy on each node before it saves to the shared folder. Module `load` reads a checkpoint in
a process without MPI. The code in `write/` saves a step, the code in `read/` restores a step, and
the code in `export/` writes a step in other formats. The format of the files is in `format/`, and
all system calls that change the disk are in `storage/`.
"""
