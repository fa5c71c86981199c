"""Sharded parameter servers on two-sided messages: BSP, ASP and SSP, several models at once.

Reading order: `consistency` (when), `placement` and `routing` (where), `client`, `server`,
`group`.

``mpidist.parameter_server(comm, params, ...)`` is a call, and this package has the same name:
importing any module of it would hide a function of that name. So the package can be called.
"""

import sys
import types


class _Package(types.ModuleType):
    def __call__(self, comm, params, **options):
        """`one_model.parameter_server`."""
        from .one_model import parameter_server

        return parameter_server(comm, params, **options)


sys.modules[__name__].__class__ = _Package
