"""One reader for each format: what is in a file, and each record checked as it is read."""
