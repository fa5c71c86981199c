"""Save a step: describe the state, plan which rank writes which parts, write them, and commit."""
