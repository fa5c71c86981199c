"""A reader for each file format, which checks each record when it is read."""
