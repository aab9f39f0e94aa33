"""The messages by which workers are given other duties, and by which they ask what is to become of what they have.

An answer that is being written moves like this; D writes it all the while, and stops only for the last piece::

    D --Relieve---------------------------> gateway   may others go on with these?
    gateway --Submit(leg=decode, joins)---> E         the same request and epoch; ``pages_from`` is D
    E --PullPages(ahead)------------------> D         E has room for all that is known, and for what D writes meanwhile
    D --PageReady*------------------------> E         pages that are full; D goes on writing
    D --PageReady, PrefillDone------------> E         D has stopped: the page that is not full, the tokens since Relieve
    E --Tokens----------------------------> gateway
    E --PagesReceived(taken)--------------> D         D forgets the answer
    D --Returned(handed over)-------------> gateway

Whatever goes wrong before the last word, D goes on writing, or the request is submitted anew.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.types import Count, Duty, RequestId, Role
from penstock.wire.base import Message

HANDED_OVER = "handed over"
"""The reason of a leg that another worker goes on with."""


DRAINING, ROLE_CHANGED = "draining", "role changed"
"""Reasons of legs that have not begun and go back to their gateways, because an operator said something."""

NO_FAULT = (DRAINING, ROLE_CHANGED, HANDED_OVER, "yielded")
"""Reasons that say nothing against the request or its workers: no attempt that failed.  Who yields makes room."""


class Assign(Message, frozen=True, kw_only=True, tag="assign"):
    """A gateway to a worker, because an operator said so.  What is None stays as it is.

    The worker answers all gateways with a Report that shows it.  Said twice it changes nothing.
    """

    role: Role | None = None
    duty: Duty | None = None


class Relieve(Message, frozen=True, kw_only=True, tag="relieve"):
    """A worker to a gateway: these answers are being written here and should go on elsewhere.

    Said again every so often while nobody has come for them.
    """

    requests: tuple[tuple[Annotated[RequestId, msgspec.Meta(max_length=1024)], Count], ...]  # each with its epoch


class StillWanted(Message, frozen=True, kw_only=True, tag="still_wanted"):
    """A worker to a gateway: these were asked for a while ago.  What is not wanted any more is cancelled once more.

    A cancel can be lost with its connection, or on a connection that lives; and what nobody has asked for pages yet has
    no lease that would end.
    """

    requests: tuple[tuple[Annotated[RequestId, msgspec.Meta(max_length=1024)], Count], ...]  # each with its epoch
