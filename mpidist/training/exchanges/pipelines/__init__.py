"""The settings of the strategy `Pipeline`, and the choice of its cuts and of the stages' ranks."""
