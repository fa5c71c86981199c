"""The layout of a model: which server holds which part, how messages list parts, and the memory
needed.
"""
