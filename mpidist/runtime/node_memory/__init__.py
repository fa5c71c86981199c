"""Memory of a node: how ranks of one node read and write each other's data without messages.

`arena` allocates memory that all ranks of a node share. `cross_memory` copies between the private
memory of two ranks by a system call.
"""
