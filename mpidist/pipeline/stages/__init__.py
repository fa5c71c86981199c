"""The runtime of pipelines: `Stage` computes a rank's layers, and sends data to other stages."""
