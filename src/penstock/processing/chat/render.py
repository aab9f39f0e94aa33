"""From the messages of a chat to prompt tokens, and to what is needed to parse the output.

Knows nothing about fields or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from penstock.errors import RequestError
from penstock.grammar.sources import ToolFunction, tool_call_grammar
from penstock.processing.chat.template import ChatTemplates, Conversation, TemplateAdapter
from penstock.processing.parsers.incremental import ToolSchemas
from penstock.processing.parsers.parser import OutputFormat, OutputParser
from penstock.processing.parsers.registry import ForcedToolCall, forced_tool_call
from penstock.processing.requests.tools_and_grammar import ToolOptions
from penstock.processing.tokenizer.tokenizer import TextTokenizer
from penstock.types import Grammar

_FINAL = "<|channel|>final<|message|>"
"""How harmony begins an answer that is content."""


class OutputParserFactory(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer to one prompt is to be read."""

    format: OutputFormat
    tools: ToolSchemas | None = None  # None: calls are not looked for
    thinking: bool = False  # the prompt ends within reasoning
    before: str = ""  # of the answer, what the prompt has already
    parallel: bool = True
    visible: frozenset[int] = frozenset()  # control tokens that the format must see

    def parser(self, identity: str) -> OutputParser:
        """For one answer."""
        parser = OutputParser(
            self.format, tools=self.tools, thinking=self.thinking, identity=identity, parallel=self.parallel
        )
        parser.push(self.before)
        return parser


class RenderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a rendering apart from the conversation."""

    tooling: ToolOptions
    constrained: bool = False  # the answer is content that follows a grammar
    closed: bool = False  # objects of the tools' arguments have no properties that are not named
    add_special_tokens: bool = False

    @property
    def direct(self) -> bool:
        """Whether the answer must begin at once, without reasoning: a grammar has none."""
        return self.constrained or self.tooling.required


class RenderedPrompt(msgspec.Struct, frozen=True):
    """A chat as its model reads it."""

    tokens: tuple[int, ...]
    reply: OutputParserFactory | None  # None: the answer is content and nothing else
    grammars: tuple[Grammar, ...] = ()  # of an answer that must be calls; the first that can be followed counts


class ChatRenderer:
    """The chats of one model."""

    def __init__(self, templates: ChatTemplates) -> None:
        self.literals = templates.literals
        self._plain = TemplateAdapter(templates.for_chat(tools=False))
        with_tools = templates.for_chat(tools=True)
        self._with_tools = self._plain if with_tools is self._plain.template else TemplateAdapter(with_tools)

    def render(
        self, tokenizer: TextTokenizer, conversation: Conversation, wish: RenderOptions, check: Callable[[int], None]
    ) -> RenderedPrompt:
        """The tokens of a chat.  Only the template can write control tokens.

        ``check`` is called with the length of the rendered text in characters before it is encoded, and may raise.
        Raises RequestError.
        """
        adapter = self._with_tools if wish.tooling.tools else self._plain
        conversation = msgspec.structs.replace(conversation, tools=wish.tooling.tools or None)
        if wish.direct:
            arguments = {"enable_thinking": False, "thinking": False, **conversation.arguments}
            conversation = msgspec.structs.replace(conversation, arguments=arguments)
        adapted = adapter.adapted(conversation)
        control = tokenizer.control
        guarded = any(map(control.suspicious, _given(adapted)))
        rendered = adapter.template.render(_marked(adapted, tokenizer) if guarded else adapted)
        check(control.unmarked_chars(rendered) if guarded else len(rendered))
        if wish.direct and adapted.add_generation_prompt:
            rendered += _skipped(adapter.format, rendered, wish)
        if guarded:
            tokens = tokenizer.encode_guarded(control.guarded(rendered))
        else:
            tokens = tokenizer.encode(rendered, add_special_tokens=wish.add_special_tokens)
        if not tokens:
            raise RequestError("The messages are empty: they have no tokens.", param="messages", code="empty_prompt")
        return _written(tokens, adapter.format, tokenizer, wish, rendered)


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


def _skipped(form: OutputFormat, rendered: str, wish: RenderOptions) -> str:
    """What the model would write before an answer that must begin at once."""
    if form.harmony:
        return "" if wish.tooling.required else _FINAL
    if form.reasoning is None or not _thinks(form, rendered):
        return ""
    line = "" if rendered.endswith("\n") else "\n"
    return f"{line}{form.reasoning.end}\n\n"


def _thinks(form: OutputFormat, rendered: str) -> bool:
    """Whether the prompt ends within reasoning."""
    return form.reasoning is not None and rendered.rstrip().endswith(form.reasoning.begin)


def _written(
    tokens: tuple[int, ...], form: OutputFormat, tokenizer: TextTokenizer, wish: RenderOptions, rendered: str
) -> RenderedPrompt:
    tooling = wish.tooling
    calls = bool(tooling.tools) and (tooling.required or not wish.constrained)
    if not (form.harmony or form.reasoning or calls):
        return RenderedPrompt(tokens, None)
    grammars: tuple[Grammar, ...] = ()
    if tooling.required:
        demanded = forced_tool_call(form, tokenizer.special_id)
        form, grammars = demanded.format, _grammars(demanded, tooling, closed=wish.closed)
    ids = map(tokenizer.special_id, form.marks(calls=calls))
    plan = OutputParserFactory(
        format=form,
        tools=ToolSchemas(tooling.parameters()) if calls else None,
        thinking=_thinks(form, rendered),
        before=_FINAL if form.harmony and rendered.endswith(_FINAL) else "",
        parallel=tooling.parallel,
        visible=frozenset(token for token in ids if token is not None),
    )
    return RenderedPrompt(tokens, plan, grammars)


def _grammars(demanded: ForcedToolCall, tooling: ToolOptions, *, closed: bool) -> tuple[Grammar, ...]:
    """Calls whose arguments follow their schemas; for schemas that cannot be followed, calls with any objects."""
    schemas = tooling.parameters()
    names = [tooling.named] if tooling.named is not None else list(schemas)
    several = demanded.several and tooling.parallel
    grammars: list[Grammar] = []
    for strict in (True, False):
        tools = [ToolFunction(name=name, parameters=schemas[name] if strict else {}) for name in names]
        with suppress(ValueError):
            grammars.append(tool_call_grammar(tools, demanded.shape, several=several, closed=closed))
    return tuple(grammars)
