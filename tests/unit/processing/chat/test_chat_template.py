"""Chat templates: what transformers renders is what we render, and nothing that a template does can hurt."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from chat_corpus import CONVERSATIONS

from penstock.errors import ModelError, RequestError
from penstock.processing.chat.template import (
    ChatTemplate,
    ChatTemplates,
    Conversation,
    TemplateLimits,
    load_template_sources,
)

TESTS = Path(__file__).parents[3]
OURS = sorted((TESTS / "fixtures" / "templates").glob("*.jinja"))
SHARED = Path(os.environ.get("SHARED_FOR_TESTS", TESTS.parents[1] / "shared")) / "data" / "templates"
THEIRS = sorted(SHARED.rglob("*.jinja"))

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
LIMITS = TemplateLimits(max_output_bytes=100_000, max_seconds=1.0)
ONE = [{"role": "user", "content": "Hello <b> & 'q' \"z\" é "}]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, special=SPECIAL, limits=LIMITS)


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return template_of(source).render(Conversation(messages=messages, **options))


def outcome_of_transformers(source: str, conversation: Conversation) -> str | Exception:
    """The text, or what went wrong."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    try:
        (text,), _ = utils.render_jinja_template(
            [list(conversation.messages)],
            tools=conversation.tools,
            documents=conversation.documents,
            chat_template=source,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **SPECIAL,
            **conversation.arguments,
        )
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    return str(text)


def check_against_transformers(source: str) -> int:
    """Returns how many conversations the template took."""
    template = template_of(source)
    taken = 0
    for name, conversation in CONVERSATIONS.items():
        theirs = outcome_of_transformers(source, conversation)
        if isinstance(theirs, str):
            assert template.render(conversation) == theirs, name
            taken += 1
        elif not conversation.continue_final_message:  # transformers refuses more of these, by the template's source
            with pytest.raises(RequestError) as refused:
                template.render(conversation)
            said = "calls itself" if isinstance(theirs, RecursionError) else str(theirs)
            assert said in str(refused.value), name
    return taken


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_renders_as_transformers_does(path: Path):
    assert check_against_transformers(path.read_text()) > 0


@pytest.mark.skipif(not THEIRS, reason="the models' own templates are not in this repository (SHARED_FOR_TESTS)")
@pytest.mark.parametrize("path", THEIRS, ids=lambda path: path.stem)
def test_models_own_templates_render_as_transformers_does(path: Path):
    assert check_against_transformers(path.read_text()) >= 3


def test_refusals_are_in_the_templates_own_words():
    source = (TESTS / "fixtures" / "templates" / "alternating.jinja").read_text()
    with pytest.raises(RequestError, match="roles must alternate user and assistant") as refused:
        ours(source, [*ONE, *ONE])
    assert (refused.value.param, refused.value.code) == ("messages", "template_error")


def test_arguments_reach_the_template_and_cannot_replace_ours():
    source = (TESTS / "fixtures" / "templates" / "thinking.jinja").read_text()
    on = ours(source, ONE, add_generation_prompt=True, arguments={"date_string": "today"})
    off = ours(source, ONE, add_generation_prompt=True, arguments={"enable_thinking": False, "messages": []})
    assert on.endswith("<|head|>assistant<|text|>")
    assert "It is today." in on
    assert off.endswith("<think>\n\n</think>\n\n")
    assert "Hello" in off


def test_the_last_message_can_be_continued():
    messages = [*ONE, {"role": "assistant", "content": "Once upon a "}]
    plain = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert ours(plain, messages, continue_final_message=True).endswith("[Once upon a ")
    trims = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert ours(trims, messages, continue_final_message=True).endswith("[Once upon a")
    with pytest.raises(RequestError, match="does not show the last message"):
        ours("{{ messages[0].content }}", messages, continue_final_message=True)


HOSTILE = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over what is written down": "{% set x = [1] * 9999 %}{% for a in x %}{% for b in x %}{% for c in x %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a range without end": "{{ range(10 ** 9) | list }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "much output": "{% for a in range(99999) %}{{ 'xxxxxxxxxx' }}{% endfor %}",
    "a long product": "{{ 'x' * 10 ** 9 }}",
    "a long product, turned": "{{ 10 ** 9 * 'x' }}",
    "a list product": "{{ [1] * 10 ** 9 }}",
    "a large power": "{{ 9 ** 999999999 }}",
    "a large power, step by step": "{% set n = namespace(v=9) %}{% for i in range(60) %}{% set n.v = n.v * n.v %}"
    "{% endfor %}",
    "doubling with +": "{% set n = namespace(v='xy') %}{% for i in range(60) %}{% set n.v = n.v + n.v %}{% endfor %}",
    "doubling with ~": "{% set n = namespace(v='xy') %}{% for i in range(60) %}{% set n.v = n.v ~ n.v %}{% endfor %}",
    "a long format": "{{ '%1000000000d' % 1 }}",
    "a long format method": "{{ '{:>1000000000}'.format(1) }}",
    "a long centre": "{{ 'x'.center(10 ** 9) }}",
    "a long replace": "{{ ('x' * 90000).replace('x', 'y' * 90000) }}",
    "a long replace filter": "{{ ('x' * 90000) | replace('x', 'y' * 90000) }}",
    "a long join": "{{ range(90000) | join('x' * 90000) }}",
    "a long join method": "{{ ('x' * 90000).join(['a'] * 90000) }}",
    "a long indent": "{{ 'x' | indent(10 ** 9, true) }}",
    "long numbers": "{{ (5).to_bytes(10 ** 9, 'big') }}",
    "wide JSON": "{{ [1] | tojson(indent=10 ** 9) }}",
    "an attribute of a type": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a namespace's inside": "{% set n = namespace(__class__=1) %}{{ n }}",
    "a change of what it was given": "{{ messages.append(1) }}",
    "an import": "{% include '/etc/passwd' %}",
    "words of its own": "{{ lipsum(99999) }}",
    "what is not there": "{{ messages[0].nothing.at.all }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_stopped(source: str):
    limits = TemplateLimits(max_output_bytes=100_000, max_seconds=0.3)
    template = ChatTemplate(source, special=SPECIAL, limits=limits)
    began = time.process_time()
    with pytest.raises(RequestError) as refused:
        template.render(Conversation(messages=ONE, add_generation_prompt=True))
    assert time.process_time() - began < 2.0
    assert refused.value.code in ("template_limit", "template_error")


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1 +", "{% unknown %}", "x" * (2 << 20)])
def test_what_is_no_template_is_refused_at_the_start(source: str):
    with pytest.raises(ModelError, match="template"):
        template_of(source)


def test_literals_are_everything_that_the_template_itself_says():
    template = template_of("<|a|>{{ '<|b|>' + x }}{% if y == '<|c|>' %}<|d|>{% endif %}")
    assert {"<|a|>", "<|b|>", "<|c|>", "<|d|>", "<s>"} <= template.literals


def test_the_last_of_several_parts_is_continued():
    parts = [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon "}, {"type": "image"}]
    source = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    assert ours(source, [{"role": "assistant", "content": parts}], continue_final_message=True) == "[Once ][upon "
    with pytest.raises(RequestError, match="no text that could be continued"):
        ours(source, [{"role": "assistant", "content": [{"type": "image"}]}], continue_final_message=True)


def test_where_a_models_templates_are_found(tmp_path: Path):
    assert load_template_sources(tmp_path, {}) == {}
    assert load_template_sources(tmp_path, {"chat_template": "a"}) == {"default": "a"}
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load_template_sources(tmp_path, {"chat_template": named}) == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "old file"}')
    assert load_template_sources(tmp_path, {"chat_template": "a"}) == {"default": "old file"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_template_sources(tmp_path, {"chat_template": "a"}) == {"default": "file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_template_sources(tmp_path, {}) == {"default": "file", "tool_use": "tools"}


def test_files_that_hold_no_templates_are_refused(tmp_path: Path):
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ModelError, match=r"chat_template\.json is not JSON"):
        load_template_sources(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_text("x" * (2 << 20))
    with pytest.raises(ModelError, match="larger than"):
        load_template_sources(tmp_path, {})
    many = [{"name": f"n{i}", "template": ""} for i in range(99)]
    with pytest.raises(ModelError, match="99 chat templates"):
        load_template_sources(tmp_path / "none", {"chat_template": many})


def test_which_template_a_chat_takes():
    def chosen(*names: str, tools: bool) -> str:
        templates = ChatTemplates({name: name for name in names}, special=SPECIAL, limits=LIMITS)
        return templates.for_chat(tools=tools).render(Conversation(messages=ONE))

    assert chosen("default", "tool_use", "rag", tools=True) == "tool_use"
    assert chosen("default", "tool_use", "rag", tools=False) == "default"
    assert chosen("default", "rag", tools=True) == "default"
    assert chosen("rag", tools=False) == "rag"
    with pytest.raises(ModelError, match="named rag, tool_use and none named 'default'"):
        chosen("rag", "tool_use", tools=False)
