"""Engines carry out reductions: by schedules, by MPI's own calls, or in a node's shared memory.

`programs` picks the engine for a schedule. Everything that an engine needs of plans is handed in,
so that nothing here knows a public function.
"""
