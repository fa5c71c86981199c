"""Export of a step to other formats: safetensors, NumPy, plain HDF5, and an HDF5 index."""
