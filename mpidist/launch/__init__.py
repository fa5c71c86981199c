"""How processes start and end on a machine: launchers, cores, child processes, heartbeats.

Everything here is local to a process, and no MPI is imported before `start_checks.initialize`: what
the launcher says and what is wrong with it (`claims`, `start_checks`), the first line of a run
(`start_report`), variables of ours and of the MPI library (`environment`), cores
(`binding`), `mpiexec` and its words (`launchers`), child processes that are all ended again
(`processes`), memory that is left (`free_memory`), the sign of life that a supervisor reads
(`heartbeat`), and faults that a test asks for (`fault_points`, `faults`).
"""
