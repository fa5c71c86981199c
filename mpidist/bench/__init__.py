"""What users measure on their own cluster, in turn with what it is compared with.

A file is one measurement; `interleave`, `ratios` and `report` are what all of them need. The
commands are in `cli/bench/`.
"""
