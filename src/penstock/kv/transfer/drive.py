"""Doing what a turn asks for, over a listener and links: the same few lines for every worker, bench and test."""

from __future__ import annotations

from collections.abc import Callable

from penstock.kv.transfer.effects import (
    FirstToken,
    Granted,
    Outrun,
    PagesAdvanced,
    PullFailed,
    ReceiverTurn,
    Released,
    SenderTurn,
)
from penstock.kv.transfer.sender import HandOverSender
from penstock.wire.messages import PageSource, PagesReceived, PullPages
from penstock.wire.transport import Listener


def post(turn: SenderTurn, listener: Listener, sender: HandOverSender, now: float) -> list[Granted | Released]:
    """Send what the sending end asks for; what is left is for the scheduler."""
    for send in turn.sends:
        if not listener.send(send.peer, send.message, send.payload):
            sender.unsent(send.peer, now)
    return turn.effects


def post_pulls(
    turn: ReceiverTurn, say: Callable[[PageSource, PullPages | PagesReceived], object]
) -> list[PagesAdvanced | FirstToken | Outrun | PullFailed]:
    """Send what the receiving end asks for with ``say``; what is left is for the scheduler."""
    for send in turn.sends:
        say(send.source, send.message)
    return turn.effects
