"""Copies of shards on other servers, so that no step is lost if a server dies.

A shard is the part of a model that one server holds. Each server holds a copy of the shard of the
server before it. After a death, the living ranks divide the model anew between the living servers,
from shards and copies.
"""
