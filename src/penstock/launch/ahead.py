"""Preloads, in the supervisor, the modules that its children import: a child that is restarted runs the code that the
service started with, even if the package on disk has changed since, and it starts sooner.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

log = logging.getLogger(__name__)

GATEWAY_MODULES = (
    "uvicorn.lifespan.on",  # uvicorn imports it by name when it starts
    "penstock.launch.front",
    "penstock.launch.gateway",
    "penstock.launch.worker",
)
"""Imported by the processes of a service."""


def preload(modules: Sequence[str]) -> None:
    """Import these modules, and uvloop if it is installed.  Called when all children are ready.

    A module that cannot be imported does not end a running service: a warning is logged.
    """
    try:
        for module in modules:
            import_module(module)
        if find_spec("uvloop") is not None:
            import_module("uvloop")
    except Exception as error:  # noqa: BLE001 - modules of two versions fail in any way
        log.warning("the package on disk has changed (%s): a gateway that dies may not come back", error)
