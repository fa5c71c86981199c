"""What pipelines decide before a run: where to cut a model."""
