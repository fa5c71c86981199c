"""Training: where collectives, servers, data, checkpoints and the guard meet.

Read ``train.py`` first; ``replicas.py`` and ``served.py`` are what a strategy does with gradients.
"""
