"""Export a saved step as safetensors, NumPy or HDF5, or as an HDF5 file that refers to it."""
