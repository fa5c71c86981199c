"""A reader for each file format. Each record is checked when it is read."""
