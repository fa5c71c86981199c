"""Whether MPI moves device memory itself: proved by ``python -m mpidist.gpu_direct``."""
