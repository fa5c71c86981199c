"""How a checkpoint store uses the disk.

The modules here make all system calls of a store, name and read the step folders, lock the store's
folder, remove old steps, and start the threads that read, write and remove files.
"""
