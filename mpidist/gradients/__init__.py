"""Gradient exchange: in buckets, while the backward pass still runs."""
