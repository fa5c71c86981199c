"""Grids of stages and replicas: which host has which stage, the order of "pipedream", new cuts."""
