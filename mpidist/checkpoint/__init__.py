"""A store of checkpoints that are whole or not there, and restart on another number of ranks.

`store` is the public class and `tiered` the one that keeps copies on nodes first; `load` reads
without a job. A save runs through `write/`, a restore through `read/`; both speak of the files in
`format/` and touch the disk through `storage/` alone.
"""
