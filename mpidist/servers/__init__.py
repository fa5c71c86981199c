"""Parameter servers: each server holds a part of the model, and workers push and pull.

Read the modules in this order. `consistency` decides when a server applies pushed gradients and
answers a pull of parameters in the modes BSP, ASP and SSP; `modes/` has further modes. `layout/`
decides which server holds which tensors. `client` is the code of a worker, and `server` is the code
of a server. `group` has `ServerGroup`, which divides the ranks of a communicator into workers and
servers. The function ``mpidist.parameter_server`` is the short way to put one model on servers.
"""
