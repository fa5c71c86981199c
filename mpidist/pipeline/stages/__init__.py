"""The runtime of pipelines: `Stage` computes a rank's layers and exchanges data with stages."""
