"""Rows of tables on parameter servers: policies, sums of gradients, open tables, and a cache.

A push or a pull may name rows of a tensor. The servers then read, update and send only these rows,
so the cost does not grow with the size of the table.
"""
