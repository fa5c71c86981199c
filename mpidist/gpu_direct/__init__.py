"""The test whether MPI can move device memory: ``python -m mpidist.gpu_direct``."""
