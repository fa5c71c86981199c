"""`mpidist launch`: start a job, notice that it died or hangs, and start it again.

An attempt is one start of the program on all ranks. The module `attempts` starts one attempt after
the other. `policy` decides what follows an attempt, by pure functions. `liveness` and `deaths`
notice that ranks have died or hang. `one_attempt` watches one attempt, and `growth` lets it hand
its run over to an attempt with more ranks. `history` is the record of all attempts. `commands` and
`hosts` make the command line of the next start.
"""
