"""Sharded parameter servers on two-sided messages: BSP, ASP and SSP, several models at once.

Reading order: `consistency` (when), `placement` and `routing` (where), `client`, `server`,
`group`.
"""
