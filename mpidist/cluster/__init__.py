"""What concerns the machine and not the model: benchmarks; later doctor, planner, supervisor."""
