"""What the ranks of a grid of stages and replicas do, beyond the schedules of one pipeline."""
