"""The runtime of pipelines: a `Stage` computes the layers of its rank and sends to other stages."""
