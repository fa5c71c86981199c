"""The benchmarks of parameter servers: `mpidist bench ps` and `mpidist bench servers`."""
