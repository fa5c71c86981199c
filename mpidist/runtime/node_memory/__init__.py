"""Memory of a node: how ranks of one node read and write each other's data without messages."""
