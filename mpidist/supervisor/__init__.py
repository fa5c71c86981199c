"""`mpidist launch`: start a job, notice that it died or hangs, and start it again.

`attempts` is the loop and `policy` its decisions, which are pure; `liveness` and `deaths` notice
that ranks are gone, `commands` and `hosts` are the words for the next start.
"""
