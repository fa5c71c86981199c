"""Training: where collectives, servers, data, checkpoints and the guard meet.

Read ``train.py`` first; ``exchanges/`` is what a strategy does with gradients.
"""
