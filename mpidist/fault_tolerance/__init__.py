"""Fault tolerance of a training loop: timely saves, hangs, slow ranks, equal replicas.

`guard` saves and leaves on signals and time limits, `watch` finds a hang and says where, by
`hang` and `hang_dump`; `stragglers` names slow ranks; `check_replicas` compares bytes.
"""
