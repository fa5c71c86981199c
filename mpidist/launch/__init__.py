"""How processes start on a machine: what the launcher tells, which launcher, and what keeps them.

Everything here is local to a process and imports no MPI before `start_checks.initialize`: the
variables of a launcher and what is wrong with them (`environment`, `start_checks`), cores
(`binding`), `mpiexec` and its words (`launchers`), child processes that are all ended again
(`processes`), memory that is left (`free_memory`), the sign of life that a supervisor reads
(`heartbeat`), and faults that a test asks for (`fault_points`, `faults`).
"""
