"""Restore a step: plan which rank reads which bytes, read and check them, and fill the arrays."""
