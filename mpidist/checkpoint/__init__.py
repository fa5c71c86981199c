"""A checkpoint store. A step is complete or absent, and restarts on any number of ranks.

`store` is the public class and `tiered` the one that keeps copies on nodes first; `load` reads
without a job. A save runs through `write/`, a restore through `read/`; both speak of the files in
`format/` and touch the disk through `storage/` alone.
"""
