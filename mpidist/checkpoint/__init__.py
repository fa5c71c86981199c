"""Save and load checkpoints of a training job.

A checkpoint is the state of a job after one of its training steps, and is also called a step. A
saved step is always complete, because a failed save leaves no part of a step. Any number of ranks
can load a step, whatever number of ranks saved it.
"""
