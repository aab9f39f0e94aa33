"""From the messages of a chat to tokens, and to what must be known of the prompt to read the answer to it.

Knows nothing about fields or requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.errors import RequestError
from penstock.intake.adapting import Adapter
from penstock.intake.replies.parser import ReplyFormat, ReplyParser
from penstock.intake.replies.reply import Tools
from penstock.intake.template import Conversation
from penstock.intake.template_files import ChatTemplates
from penstock.intake.tokenizer import TextTokenizer
from penstock.intake.tool_fields import Tooling


class ReplyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer to one prompt is to be read."""

    format: ReplyFormat
    tools: Tools | None = None  # None: calls are not looked for
    thinking: bool = False  # the prompt ends within reasoning
    parallel: bool = True
    visible: frozenset[int] = frozenset()  # control tokens that the format must see

    def parser(self, identity: str) -> ReplyParser:
        """For one answer."""
        return ReplyParser(
            self.format, tools=self.tools, thinking=self.thinking, identity=identity, parallel=self.parallel
        )


class Written(msgspec.Struct, frozen=True):
    """A chat as its model reads it."""

    tokens: tuple[int, ...]
    reply: ReplyPlan | None  # None: the answer is content and nothing else


class Chats:
    """The chats of one model."""

    def __init__(self, templates: ChatTemplates) -> None:
        self.literals = templates.literals
        self._plain = Adapter(templates.for_chat(tools=False))
        with_tools = templates.for_chat(tools=True)
        self._with_tools = self._plain if with_tools is self._plain.template else Adapter(with_tools)

    def write(
        self, tokenizer: TextTokenizer, conversation: Conversation, tooling: Tooling, *, add_special_tokens: bool
    ) -> Written:
        """The tokens of a chat.  Only the template can write control tokens.  Raises RequestError."""
        adapter = self._with_tools if tooling.tools else self._plain
        adapted = adapter.adapted(msgspec.structs.replace(conversation, tools=tooling.tools or None))
        control = tokenizer.control
        guarded = any(map(control.suspicious, _given(adapted)))
        rendered = adapter.template.render(_marked(adapted, tokenizer) if guarded else adapted)
        if guarded:
            tokens = tokenizer.encode_guarded(control.guarded(rendered))
        else:
            tokens = tokenizer.encode(rendered, add_special_tokens=add_special_tokens)
        if not tokens:
            raise RequestError("The messages are empty: they have no tokens.", param="messages", code="empty_prompt")
        return Written(tokens, _reply(adapter.format, tokenizer, tooling, rendered))


def text_size(value: Any) -> int:
    """Characters of all texts within ``value``."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + text_size(item) for key, item in value.items())
    return sum(map(text_size, value)) if isinstance(value, list | tuple) else 0


def _given(conversation: Conversation) -> Iterable[Any]:
    """All that comes from the client."""
    return conversation.messages, conversation.tools, conversation.documents, conversation.arguments


def _marked(conversation: Conversation, tokenizer: TextTokenizer) -> Conversation:
    mark = tokenizer.control.mark
    return msgspec.structs.replace(
        conversation,
        messages=mark(conversation.messages),
        tools=mark(conversation.tools),
        documents=mark(conversation.documents),
        arguments=mark(conversation.arguments),
    )


def _reply(form: ReplyFormat, tokenizer: TextTokenizer, tooling: Tooling, rendered: str) -> ReplyPlan | None:
    if not (form.harmony or form.reasoning or tooling.tools):
        return None
    ids = map(tokenizer.token_id, form.marks(calls=bool(tooling.tools)))
    return ReplyPlan(
        format=form,
        tools=Tools(tooling.parameters()) if tooling.tools else None,
        thinking=form.reasoning is not None and rendered.rstrip().endswith(form.reasoning.begin),
        parallel=tooling.parallel,
        visible=frozenset(token for token in ids if token is not None) & tokenizer.table.special,
    )
