"""Save and load checkpoints of a training job.

A checkpoint is called a step: the state of the job after that training step. A saved step is always
complete, because a failed save leaves no part of a step. Any number of ranks can load a step,
whatever number of ranks saved it.
"""
