"""The state that mpidist keeps for a communicator, and how its ranks wait, agree, fail and end.

`context` holds the state of one communicator, and `polling` has the function that waits for MPI.
`topology` describes the nodes of the job, and `arena` allocates memory that the ranks of a node
share. `failure` ends a job and prints the cause. `agreement/` makes all ranks raise an error when
one rank fails.
"""
