"""The disk below a store: each change to it, steps, the lock, retention, the writer thread."""
