"""Restore a saved step: plan which rank reads which bytes, read, check, and fill the arrays."""
