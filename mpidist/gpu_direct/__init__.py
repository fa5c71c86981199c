"""Test whether MPI can send and receive device memory: ``python -m mpidist.gpu_direct``."""
