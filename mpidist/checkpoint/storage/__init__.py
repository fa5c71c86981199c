"""How a checkpoint store uses the disk: system calls, step folders, locks and old steps."""
