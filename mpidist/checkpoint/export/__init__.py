"""Steps in the files of others: safetensors, their index, and plain HDF5."""
