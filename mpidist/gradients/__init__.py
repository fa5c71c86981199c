"""Average gradients over the ranks, in buckets, while the backward pass still runs."""
