"""Training: `md.train`, which uses collectives, servers, data, checkpoints and `md.guard`.

Read ``train.py`` first. ``exchanges/`` contains the ways to combine the gradients of all ranks.
"""
