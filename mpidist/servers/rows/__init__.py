"""Tables on parameter servers: workers push and pull some rows, and may keep rows in a cache.

A push or a pull may name rows of a tensor. The servers then read, update and send only these rows,
so the cost does not grow with the size of the table. The rows of an open table have 64-bit keys,
and a row is made when its key is pushed.
"""
