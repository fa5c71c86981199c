"""A restore: plan who reads what, prove it, read it once per node, and fill the arrays."""
