"""`mpidist launch`: start a job, notice that it died or hangs, and start it again.

An attempt is one start of the program on all ranks. The module `attempts` starts one attempt after
another. `one_attempt` watches one attempt. `policy` decides what to do after an attempt. `liveness`
and `deaths` notice that ranks have died or hang. `growth` lets a new attempt with more ranks
continue a training run while the present attempt still trains. `history` records all attempts in a
file. `hosts` chooses the hosts of the next attempt, and `commands` makes its command line.
"""
