"""Parameter servers: each server holds a part of the model, and workers push and pull.

Workers send (push) gradients to the servers, and fetch (pull) the new parameters from them. To read
the code, start with the module `consistency`, which decides when a server applies gradients and
when it answers a pull. The function ``mpidist.parameter_server`` is the short way to put one model
on servers.
"""
