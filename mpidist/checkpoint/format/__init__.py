"""What a checkpoint is on disk: the state and its regions, manifest, tables, and HDF5's layout."""
