"""What the scripted model writes: a function of the conversation.

Rules are asked in order, the first that has a reply gives it.  A rule looks at the user's last words, the tools that
are offered and what these gave, as a model does; what it says of results is read from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .coding import edit_a_file
from .conversation import Conversation
from .reply import Call, Reply

ADA = {"name": "Ada Lovelace", "born": 1815, "languages": ["English", "French"]}
"""Who is asked about where an answer is to have a form."""


def reply_to(conversation: Conversation) -> Reply:
    """The first rule's that knows what to say."""
    return next(reply for rule in RULES if (reply := rule(conversation)) is not None)


def _count(conversation: Conversation) -> Reply | None:
    """``Count to 2000.``"""
    found = re.search(r"[Cc]ount to (\d+)", conversation.ask)
    if found is None:
        return None
    return Reply("I count.", " ".join(str(number) for number in range(1, int(found[1]) + 1)))


def _describe(conversation: Conversation) -> Reply | None:
    """``Who was Ada?``, by a tool that takes her fields, as JSON or in prose."""
    if "Ada" not in conversation.ask:
        return None
    for name, tool in conversation.tools.items():
        fields = tool.get("parameters", {}).get("properties", {})
        if set(ADA) <= set(fields):
            return Reply("It is to be a call.", "", (Call(name, ADA),))
    if conversation.constrained or "JSON" in conversation.system:
        return Reply("", json.dumps(ADA))
    return Reply("I know her.", "Ada Lovelace, born in 1815, wrote the first program.")


def _weather(conversation: Conversation) -> Reply | None:
    """Two calls at once, then one of another tool with what these gave, then an answer that tells all three."""
    weather = next((name for name in conversation.tools if "weather" in name.lower()), None)
    if "weather" not in conversation.ask or weather is None:
        return None
    cities = list(dict.fromkeys(re.findall(r"\b(Paris|Oslo)\b", conversation.ask)))
    given = [result for round_ in conversation.results for result in round_]
    if not given:
        calls = tuple(Call(weather, {"city": city}) for city in cities)
        return Reply("I need the weather of each city.", "I look it up.", calls)
    if len(given) == len(cities) and "get_time" in conversation.tools:
        return Reply("Now the time.", "", (Call("get_time", {"city": cities[0], "format": "24h"}),))
    return Reply("I have it all.", "Found: " + "; ".join(" ".join(result.split()) for result in given) + ".")


def _greet(conversation: Conversation) -> Reply | None:
    """Anything else."""
    return Reply(
        "The user says something.",
        "Hello from Penstock! \N{WAVING HAND SIGN} What shall we build today, and where do we begin?",
    )


RULES: tuple[Callable[[Conversation], Reply | None], ...] = (edit_a_file, _count, _describe, _weather, _greet)
