"""What a strategy does with gradients: an allreduce, its microbatches, or a push to servers."""
