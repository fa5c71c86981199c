"""Notice that a host of the job cannot be reached, and make TCP send again sooner."""
