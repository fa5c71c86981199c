"""Which server holds which part of a model, how messages list parts, and the memory needed."""
