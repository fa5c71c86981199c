"""Parameter servers that divide one or more models between them, from synchronous to asynchronous.

The modules follow in the order in which a reader should read them. `consistency` decides when a
server applies pushed gradients and answers a pull of parameters in the modes BSP, ASP and SSP, and
`modes/` has further modes. `layout/` decides which server
holds which tensors. `client` is the code of a worker, `server` is the code of a server, and `group`
makes workers and servers of the ranks. The function ``mpidist.parameter_server`` is the short way
to put one model on servers.
"""
