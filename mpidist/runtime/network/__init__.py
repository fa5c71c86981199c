"""What a rank does while a host of its job cannot be reached over the network.

`network_watch` is a thread that notices it, tells the user, and makes TCP try again every second.
`tcp_backoff` finds the connections that get no answer, and sets how long TCP waits.
"""
