"""Average gradients over the ranks, in parts (buckets), while the backward pass still runs."""
