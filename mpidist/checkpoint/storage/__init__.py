"""The files of a store: system calls, step folders, the lock, removal of steps, and threads."""
