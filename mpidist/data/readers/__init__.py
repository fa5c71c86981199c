"""A reader for each file format. Records are checked when they are read."""
