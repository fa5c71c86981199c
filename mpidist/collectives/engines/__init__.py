"""What carries a reduction out: the executor of schedules, MPI's own calls, and a node's memory.

`programs` picks the engine for a schedule. Everything that an engine needs of plans is handed in,
so that nothing here knows a public function.
"""
