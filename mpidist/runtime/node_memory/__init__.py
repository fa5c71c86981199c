"""Memory of a node: how ranks of one node read and write each other's data without messages.

`arena` allocates memory that all ranks of a node share, and `mapped_file` maps it. `cross_memory`
copies between the private memory of two ranks by a system call.
"""
