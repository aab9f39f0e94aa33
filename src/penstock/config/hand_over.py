"""How long the two ends of a hand-over wait for each other, and what pages that are fetched over sockets may take."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.base import Config, Positive

NIXL = "nixl+"
"""Before the name of a carrier: pages are read by NIXL where both ends have it."""


class HandOverConfig(Config, frozen=True, kw_only=True):
    """How long the two ends of a hand-over wait for each other, and how much is copied between two steps."""

    lease_s: float = 10.0  # without a sign of the other side, either end gives its pages back
    copy_budget_bytes: int = 32 << 20  # copied and verified between two steps of a decode worker
    window_bytes: int = 64 << 20  # sent to one receiver and not yet acknowledged
    peer_idle_s: float = 60.0  # a link to another worker that nobody uses for so long is closed
    ahead_tokens: Annotated[int, msgspec.Meta(ge=16)] = 256  # room for what is written of an answer while it moves
    hedge_after_s: float = 0.1  # that a prompt waits for bytes alone before computing them here is thought of
    hedge_margin: float = 1.5  # computing must be so many times sooner than waiting
    connections: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2  # to each worker that sends pages over sockets
    max_connections: Positive = 256  # of receivers to one sender; more are hung up on
    max_strangers: Positive = 32  # of those, that have not proved themselves yet
    greeting_s: float = 3.0  # to prove oneself, or to answer a new connection
    fetch_stall_s: float = 3.0  # without a byte of pages that were asked for: the connection is given up
    nixl_transports: str = "rc,dc,ud"  # of UCX, over which NIXL reads pages
    nixl_devices: str = "all"  # of UCX
    fetch_tries: Positive = 3  # connections that a page is asked for over
