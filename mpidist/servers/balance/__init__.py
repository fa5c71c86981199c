"""Other shares for servers while a group trains, and the measured load that proposes them.

`common_elements` says what of a tensor two servers have in common in two layouts. `moved_arrays`
sends it, `change_shares` does so for all models of a group, and `online_shares` has the methods of
a group. `server_load` sums up what servers have measured, and `rebalance` proposes shares from it.
"""
