"""Gradients on their way: buckets, and their exchange while backward still runs."""
