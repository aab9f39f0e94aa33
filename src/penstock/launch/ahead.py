"""What the processes of a service import, imported by the supervisor when all of them are ready.

Before, it would delay them.  Whoever is forked anew from then on has the code that the service began with, whatever has
become of the package on disk meanwhile, and begins sooner.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

log = logging.getLogger(__name__)


def import_ahead() -> None:
    """Everything.  A package that cannot be read any more is no reason to end what runs: then there is a warning."""
    try:
        import uvicorn.lifespan.on  # noqa: F401 - found by name, late

        import penstock.launch.front
        import penstock.launch.gateway
        import penstock.launch.storefront
        import penstock.launch.worker  # noqa: F401

        if find_spec("uvloop") is not None:
            import uvloop  # noqa: F401
    except Exception as error:  # noqa: BLE001 - modules of two versions fail in any way
        log.warning("the package on disk has changed (%s): a gateway that dies may not come back", error)
