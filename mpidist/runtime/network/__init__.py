"""Notice that a host of the job cannot be reached, and make TCP send again sooner.

`network_watch` is a thread that notices a host that cannot be reached, tells the user, and makes
TCP try again every second. `tcp_backoff` finds the connections that get no answer, and sets how
long TCP waits before it tries again.
"""
