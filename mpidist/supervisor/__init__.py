"""`mpidist launch`: start a job, notice that it died or hangs, and start it again.

An attempt is one start of the program on all ranks. The module `attempts` starts one attempt after
another. `one_attempt` watches one attempt. `policy` decides by pure functions what to do after an
attempt. `liveness` and `deaths` notice that ranks have died or hang. `growth` lets a new attempt
with more ranks continue the run of the present attempt. `history` is the record of all attempts.
`hosts` chooses the hosts of the next attempt, and `commands` makes its command line.
"""
