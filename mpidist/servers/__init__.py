"""Sharded parameter servers on two-sided messages: BSP, ASP, SSP and dynamic SSP, several models.

Reading order: `consistency` (when), `layout/` (where), `client`, `server`, `group`.
``mpidist.parameter_server`` is the short way to one model.
"""
