"""Training: `md.train`, which uses collectives, servers, data, checkpoints and `md.guard`."""
