"""`mpidist launch`: start a job, notice that it died or hangs, and start it again.

An attempt is one start of the program on all ranks. The module `attempts` starts one attempt after
another, `one_attempt` watches an attempt, and `policy` decides what to do after it.
"""
