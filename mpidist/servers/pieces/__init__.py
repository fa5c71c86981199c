"""Messages in pieces that are one whole to the server: pushes that are collected, answers of one
version, and the sends and receives of all pieces. The room `wire` uses them.
"""
