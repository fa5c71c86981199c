"""The settings of pipelines, and what they decide before a run: cuts, and ranks of stages."""
