"""A save: look at the state, plan who writes what, write it, and commit."""
