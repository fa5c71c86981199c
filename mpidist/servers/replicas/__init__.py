"""Copies of shards on other servers, so that no step is lost if a server dies.

A shard is the part of a model that one server holds. Each server also holds a copy of the shard of
the previous server. `shard_copies` keeps the copies equal to the shards during training. After a
death, the living servers divide the model between them, from shards and copies: `repartition`
decides which rank sends what, and `move_shards` sends it. `shard_ranges` lists the arrays of a
shard for messages.
"""
