"""The format of a checkpoint on disk: states, regions of arrays, the manifest, tables, and HDF5."""
