"""The state that mpidist keeps for a communicator; how ranks wait, agree, fail and end.

`context` holds the state of one communicator, and `polling` has the function that waits for MPI.
`topology` describes the nodes of the job, and `node_memory/` is the memory through which ranks of
one node exchange data. `failure` ends a job and prints the cause. `agreement/` makes all ranks
raise an error when one rank fails. `ulfm` lets a job continue after a rank has died, and
`elastic_requests` waits for messages that the death of a rank may interrupt.
"""
