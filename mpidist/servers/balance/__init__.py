"""Change the shares of the servers during training, as the user asks or by their measured load.

A share is the fraction of each model that a server holds. `common_elements` finds the elements of a
tensor that a server holds in the old layout and another server in the new layout. `moved_arrays`
moves the arrays of a model to their new servers, and `change_shares` moves all models of a group.
`online_shares` has the methods of `ServerGroup` that change or measure the shares. `server_load`
measures the work of a server, and `rebalance` proposes shares from these measurements.
"""
