"""Rows of tables on parameter servers: which policies there are, and sums of gradients of rows.

A push or a pull may name rows of a tensor. The servers then read, update and send these rows, and
what that costs does not grow with the table. The other rooms of `servers` carry the messages; how
rows are divided between servers stands in `layout`.
"""
