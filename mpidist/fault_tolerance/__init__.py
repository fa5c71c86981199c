"""A loop that survives: saves in time, hangs that are found, ranks that are slow, equal replicas.

`guard` saves and leaves on signals and time limits, `watch` finds a hang and says where, by
`hang` and `hang_dump`; `stragglers` names slow ranks; `check_replicas` compares bytes.
"""
