"""The ways to exchange gradients: by allreduce, by microbatches, or through parameter servers."""
