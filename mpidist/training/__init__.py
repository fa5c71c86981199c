"""Training: `md.train`, which uses collectives, servers, data, checkpoints and `md.guard`.

To read the code, begin with ``train.py``. ``exchanges/`` contains the ways in which the ranks
combine their gradients.
"""
