"""Doing what a turn asks for, over a listener and links: the same few lines for every worker, bench and test."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.kv.transfer.effects import (
    FirstToken,
    Granted,
    PagesAdvanced,
    PullFailed,
    ReceiverTurn,
    Released,
    SenderTurn,
)
from penstock.kv.transfer.sender import HandOverSender
from penstock.wire.messages import PageSource
from penstock.wire.transport import Link, Listener


def post(turn: SenderTurn, listener: Listener, sender: HandOverSender, now: float) -> list[Granted | Released]:
    """Send what the sending end asks for; what is left is for the scheduler."""
    for send in turn.sends:
        if not listener.send(send.peer, send.message, send.payload):
            sender.unsent(send.peer, now)
    return turn.effects


def post_pulls(turn: ReceiverTurn, links: Mapping[PageSource, Link]) -> list[PagesAdvanced | FirstToken | PullFailed]:
    """Send what the receiving end asks for; what is left is for the scheduler.  A source without a link is skipped."""
    for send in turn.sends:
        link = links.get(send.source)
        if link is not None:
            link.send(send.message)
    return turn.effects
