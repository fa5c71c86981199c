"""Each rank trains a model of its own, and averages it with a few other ranks every few steps.

The strategy `md.PeerAverage` of `md.train` uses these modules.
"""
