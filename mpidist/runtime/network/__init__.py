"""Notice that a host of the job cannot be reached, and shorten the pauses of TCP.

`network_watch` is a thread that notices such a host, tells the user, and makes TCP try again every
second. `tcp_backoff` finds the connections that get no answer, and sets how long TCP waits before
it tries again.
"""
