"""Start and end processes on a machine: launchers, cores, child processes, heartbeats.

No module of this folder imports MPI before `start_checks.initialize` is called. `claims` and
`start_checks` read the launcher's environment variables and raise an error if the job was launched
wrongly. `start_report` makes the first line that a run prints. `environment` reads environment
variables, and `binding` checks which cores the ranks may use. `launchers` makes the command line of
`mpiexec`. `processes` starts child processes, and ends them with all their descendants.
`free_memory` and `control_groups` read how much memory a process may allocate. `heartbeat` writes a
file for each rank, which shows `mpidist launch` that the rank lives. `fault_points` and `faults`
inject the faults that a test asks for.
"""
