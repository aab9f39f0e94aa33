"""Chats in the form that a template takes, and back: what a template writes of an answer is read as that answer."""

from __future__ import annotations

import html
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_corpus import ADD, NOW, call, result, said

from penstock.processing.chat.template import ChatTemplate, Conversation, TemplateAdapter, TemplateLimits
from penstock.processing.parsers.incremental import ToolSchemas
from penstock.processing.parsers.parser import OutputParser

SHARED = Path(os.environ.get("SHARED_FOR_TESTS", Path(__file__).parents[5] / "shared")) / "data" / "templates"
THEIRS = sorted(SHARED.rglob("*.jinja"))
real_templates = pytest.mark.skipif(not THEIRS, reason="the models' own templates are not in this repository")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
LIMITS = TemplateLimits(max_output_bytes=1 << 20, max_seconds=5.0)
TOOLS = [ADD, NOW]
SCHEMAS = ToolSchemas({tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS})
USER = said("user", "Add, please.")
FIRST, SECOND = {"a": 1, "b": -2.5}, {}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@cache
def adapter_of(source: str) -> TemplateAdapter:
    return TemplateAdapter(ChatTemplate(source, special=SPECIAL, limits=LIMITS))


def rendered(adapter: TemplateAdapter, messages: list[dict[str, Any]], *, tools: bool = True, asks: bool = True) -> str:
    conversation = Conversation(messages=messages, tools=TOOLS if tools else None, add_generation_prompt=asks)
    return adapter.template.render(adapter.adapted(conversation))


def calling(*calls: tuple[str, dict[str, Any]], content: str | None = None) -> dict[str, Any]:
    """An answer with calls, as a client sends it back."""
    written = [call(name, json.dumps(arguments), f"call_{i:024}") for i, (name, arguments) in enumerate(calls)]
    return said("assistant", content, tool_calls=written)


def results(count: int) -> list[dict[str, Any]]:
    return [result(f"result {i}", f"call_{i:024}", name="add") for i in range(count)]


def read(adapter: TemplateAdapter, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = OutputParser(adapter.format, tools=SCHEMAS, thinking=False, identity="x")
    piece = parser.push(text, last=True)
    return piece.content, [(part.name or "", json.loads(part.arguments)) for part in piece.calls]


@real_templates
@pytest.mark.parametrize("path", THEIRS, ids=lambda path: path.stem)
def test_every_template_takes_tools_calls_and_results(path: Path):
    adapter = adapter_of(path.read_text())
    for messages in (
        [USER],
        [USER, calling(("add", FIRST)), *results(1)],
        [USER, calling(("add", FIRST), ("now", SECOND), content="I look."), *results(2)],
        [USER, calling(("add", FIRST), ("now", SECOND)), *results(2), said("assistant", "Done."), USER],
        [USER, calling(("now", {})), *results(1), calling(("add", FIRST)), *results(1), said("assistant", "x"), USER],
    ):
        text = rendered(adapter, messages)
        assert "Adds." in text
        assert "Add, please." in text
        assert "None" not in text
        if not adapter.traits.tools:  # told in Hermes' words, and answered in them
            assert '<tools>\n{"type": "function", "function": {"name": "add"' in text
            assert read(adapter, '<tool_call>\n{"name": "now"}\n</tool_call>')[1] == [("now", {})]
        if messages[-1]["role"] == "tool":  # some templates leave out what lies before a user's last words
            assert f"result {len(messages) - 3}" in text
            assert "-2.5" in text
            assert '\\"a\\"' not in text


@real_templates
@pytest.mark.parametrize("path", THEIRS, ids=lambda path: path.stem)
def test_what_a_template_writes_of_an_answer_is_read_as_that_answer(path: Path):
    adapter = adapter_of(path.read_text())
    for calls in ([("add", FIRST)], [("add", FIRST), ("now", SECOND)]):
        if len(calls) > 1 and not adapter.traits.many:
            continue
        before, after = rendered(adapter, [USER]), rendered(adapter, [USER, calling(*calls)], asks=False)
        # A prompt that ends with the beginning of reasoning goes on otherwise than a template writes it down.
        answer = after[len(before) :] if after.startswith(before) else after[after.rindex("Add, please.") + 12 :]
        # Two of Mistral's references write HTML's quotation marks, in transformers as here.
        assert read(adapter, html.unescape(answer))[1] == calls


def test_a_template_without_tools():
    adapter = adapter_of(CHATML)
    assert adapter.format.name == "generic"
    text = rendered(adapter, [said("system", "Be kind."), USER, calling(("add", FIRST), content="Well."), *results(2)])
    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou may call one or more functions")
    assert '<|im_start|>assistant\nWell.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2.5}}\n' in text
    one = "<tool_response>\nresult 0\n</tool_response>"
    assert f"<|im_start|>user\n{one}\n{one.replace('0', '1')}<|im_end|>\n<|im_start|>assistant" in text
    assert "functions" not in rendered(adapter, [USER], tools=False)


def test_a_template_without_tools_or_system_messages():
    adapter = adapter_of(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = rendered(adapter, [USER, calling(("now", {})), *results(2), said("user", "And?")])
    assert text.startswith("[user]You may call")
    assert text.endswith("result 1\n</tool_response>\nAnd?")


ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('at the beginning') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ALTERNATING, "[system]S[user]A\n\nL1[assistant]B[user]L2\n\nC[assistant]D[user]L3"),
        (
            ALTERNATING.replace(" and not loop.first", ""),
            "[user]S\n\nA\n\nL1[assistant]B[user]L2\n\nC[assistant]D[user]L3",
        ),
        (
            ALTERNATING.replace(" and not loop.first", " and false"),
            "[system]S[user]A[system]L1[assistant]B[system]L2[user]C[assistant]D[system]L3",
        ),
    ],
)
def test_a_system_message_that_a_template_refuses_is_text_of_the_users_where_it_stands(source: str, expected: str):
    """The text is not lost, and what comes before it stays a prefix."""
    kinds = {"S": "system", "A": "user", "B": "assistant", "C": "user", "D": "assistant"}
    chat = [said(kinds.get(word, "system"), word) for word in ("S", "A", "L1", "B", "L2", "C", "D", "L3")]
    assert rendered(adapter_of(source), chat, tools=False) == expected
    shorter = rendered(adapter_of(source), chat[:4], tools=False)
    assert expected.startswith(shorter)


def test_one_call_a_message_where_a_template_takes_no_more():
    source = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        "({{ m.tool_calls[0].function.arguments | tojson }}){% else %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    adapter = adapter_of(source)
    assert not adapter.traits.many
    messages = [USER, calling(("add", FIRST), ("now", {})), *results(2), USER]
    assert rendered(adapter, messages).endswith('({"a": 1, "b": -2.5})[result 0]({})[result 1][Add, please.]')


def test_ids_of_nine_characters_where_a_template_wants_them():
    source = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "<{{ c.id }}{{ c.function.arguments | tojson }}>{% endfor %}"
        "{% else %}[{{ m.tool_call_id }} {{ m.content }}]{% endif %}{% endfor %}"
    )
    adapter = adapter_of(source)
    assert adapter.traits.short_ids
    text = rendered(adapter, [USER, calling(("add", FIRST)), *results(1)])
    identity = text[text.index("<") + 1 :][:9]
    assert identity.isalnum()
    assert f"[{identity} result 0]" in text
    kept = rendered(adapter, [said("assistant", None, tool_calls=[call("now", "{}", "abcdef123")])])
    assert "<abcdef123{}>" in kept


def test_text_in_parts_where_a_template_takes_nothing_else():
    adapter = adapter_of("{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}")
    assert adapter.traits.parts
    assert rendered(adapter, [USER], tools=False) == "Add, please.;"


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "nonsense", ""])
def test_arguments_that_are_no_object_do_not_fail(arguments: str):
    adapter = adapter_of(
        "{{ tools | tojson }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}{{ m.content or '' }}"
        "{% endfor %}"
    )
    assert adapter.traits.objects
    text = rendered(adapter, [USER, said("assistant", None, tool_calls=[call("add", arguments)]), *results(1)])
    assert (f"arguments={arguments}" in text) == bool(arguments)
