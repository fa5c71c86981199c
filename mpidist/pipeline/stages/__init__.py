"""The code that runs pipelines: `Stage` computes a rank's layers, and sends data to others."""
