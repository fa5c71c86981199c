"""The exchanges of all strategies: objects that combine the ranks' gradients or models."""
