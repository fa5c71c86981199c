"""The layout of a model: which server holds which part, and how messages list parts."""
