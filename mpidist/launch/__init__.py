"""Start and end processes on a machine: launchers, cores, child processes, heartbeats.

No module of this folder imports MPI before `start_checks.initialize` is called.
"""
