"""Training: `md.train`, which uses collectives, servers, data, checkpoints and `md.guard`.

Begin to read the code with ``train.py``. ``exchanges/`` contains the ways to combine the gradients
of all ranks.
"""
