"""The messages of a chat as clients send them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.limits import RequestLimits
from penstock.errors import RequestError
from penstock.processing.requests.messages import joined_contents, parse_messages

HELLO = {"role": "user", "content": "Hello"}
ADDED: dict[str, Any] = {"annotations": [], "provider_specific_fields": {"refusal": None}}


def test_what_clients_add_to_a_response_that_they_send_back_is_ignored() -> None:
    reply = {"role": "assistant", "content": "Hello."}
    assert parse_messages([HELLO, reply | ADDED, HELLO], RequestLimits()) == [HELLO, reply, HELLO]


def test_it_is_refused_in_a_message_of_the_user() -> None:
    with pytest.raises(RequestError, match="provider_specific_fields"):
        parse_messages([HELLO | {"provider_specific_fields": {}}], RequestLimits())


def test_contents_are_joined_with_blank_lines_whatever_they_are_made_of() -> None:
    image, text = {"type": "image"}, {"type": "text", "text": "c"}
    assert joined_contents(["a", "b", "c"]) == "a\n\nb\n\nc"
    assert joined_contents(["a", "b", [image, text], "d", [image]]) == [
        {"type": "text", "text": "a\n\nb\n\n"},
        image,
        text,
        {"type": "text", "text": "\n\nd"},
        image,
    ]
    assert joined_contents([[image], "a"]) == [image, {"type": "text", "text": "\n\na"}]
