"""Agreement of ranks: an error on one rank is raised on all ranks of the communicator."""
