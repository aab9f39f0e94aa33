"""Every bad field of a request: status, code, field and words of its refusal; and the service goes on.

One table a kind, one ``check``.  Nothing in here may open a token stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from .http_stage import CHAT, HELLO, TEXT, Stage, check, stage


@pytest.fixture
async def on() -> AsyncIterator[Stage]:
    async with stage() as running:
        yield running
        assert running.streams.opened == [], "a bad request got to the workers"
        assert (await running.chat()).status_code == 200, "the service does not go on"


TYPE, LOW, HIGH = "invalid_type", None, None
INT_LOW, INT_HIGH = "integer_below_min_value", "integer_above_max_value"
DEC_LOW, DEC_HIGH = "decimal_below_min_value", "decimal_above_max_value"

BOTH = [  # of chats and completions: field, value, code, words
    ("temperature", -0.1, DEC_LOW, "expected a number >= 0, got -0.1"),
    ("temperature", 2.1, DEC_HIGH, "expected a number <= 2, got 2.1"),
    ("temperature", 1e-300, "invalid_value", "0 or a number from 0.0001 to 2"),
    ("temperature", "hot", TYPE, "expected a number, got 'hot'"),
    ("temperature", True, TYPE, "expected a number, got True"),
    ("temperature", [1], TYPE, "expected a number"),
    ("top_p", 0, DEC_LOW, "expected a number > 0"),
    ("top_p", -1, DEC_LOW, "expected a number >= 0"),
    ("top_p", 1.01, DEC_HIGH, "expected a number <= 1"),
    ("top_p", "1", TYPE, "expected a number"),
    ("top_k", -2, INT_LOW, "expected an integer >= -1"),
    ("top_k", 1.0, TYPE, "expected an integer, got 1.0"),
    ("top_k", True, TYPE, "expected an integer, got True"),
    ("top_k", 1 << 40, INT_HIGH, "expected an integer <= 2147483647"),
    ("min_p", 1.5, DEC_HIGH, "expected a number <= 1"),
    ("min_p", -0.5, DEC_LOW, "expected a number >= 0"),
    ("presence_penalty", -2.5, DEC_LOW, "expected a number >= -2"),
    ("presence_penalty", 2.5, DEC_HIGH, "expected a number <= 2"),
    ("frequency_penalty", 3, DEC_HIGH, "expected a number <= 2"),
    ("frequency_penalty", "0", TYPE, "expected a number"),
    ("repetition_penalty", 0, DEC_LOW, "expected a number >= 0.01"),
    ("repetition_penalty", 2.1, DEC_HIGH, "expected a number <= 2"),
    ("n", 0, INT_LOW, "expected an integer >= 1"),
    ("n", -1, INT_LOW, "expected an integer >= 1"),
    ("n", 17, INT_HIGH, "expected an integer <= 16"),
    ("n", 1.0, TYPE, "expected an integer, got 1.0"),
    ("n", True, TYPE, "expected an integer, got True"),
    ("n", "2", TYPE, "expected an integer"),
    ("seed", 1 << 63, INT_HIGH, "expected an integer <= 9223372036854775807"),
    ("seed", -(1 << 63) - 1, INT_LOW, "expected an integer >= -9223372036854775808"),
    ("seed", 1.5, TYPE, "expected an integer"),
    ("seed", "7", TYPE, "expected an integer"),
    ("seed", False, TYPE, "expected an integer"),
    ("max_tokens", -1, INT_LOW, "expected an integer >= 1"),
    ("max_tokens", 0, INT_LOW, "expected an integer >= 1"),
    ("max_tokens", 1.0, TYPE, "expected an integer"),
    ("max_tokens", True, TYPE, "expected an integer"),
    ("max_tokens", "8", TYPE, "expected an integer"),
    ("max_tokens", 1 << 40, INT_HIGH, "expected an integer <= 2147483647"),
    ("max_tokens", 5000, "context_length_exceeded", "maximum context length is 2048"),
    ("min_tokens", -1, INT_LOW, "expected an integer >= 0"),
    ("min_tokens", 9, INT_HIGH, "expected an integer <= 8"),
    ("min_tokens", "1", TYPE, "expected an integer"),
    ("stop", "", "empty_string", "not empty"),
    ("stop", 1, TYPE, "expected an array of strings"),
    ("stop", {"a": 1}, TYPE, "expected an array of strings"),
    ("stop", ["a"] * 1000, "array_above_max_length", "at most 16 strings"),
    ("stop_token_ids", 5, TYPE, "expected an array of token ids"),
    ("stop_token_ids", [4096], "invalid_value", "token ids from 0 to 4095"),
    ("stop_token_ids", [-1], "invalid_value", "token ids from 0 to 4095"),
    ("stop_token_ids", [True], TYPE, "expected an integer token id"),
    ("stop_token_ids", [1.0], TYPE, "expected an integer token id"),
    ("stop_token_ids", list(range(129)), "array_above_max_length", "at most 128"),
    ("ignore_eos", 1, TYPE, "expected a boolean, got 1"),
    ("logit_bias", [1], TYPE, "expected an object"),
    ("logit_bias", {"4096": 1}, "invalid_value", "keys that are token ids from 0 to 4095, got '4096'"),
    ("logit_bias", {"-1": 1}, "invalid_value", "token ids from 0 to 4095"),
    ("logit_bias", {"one": 1}, "invalid_value", "token ids from 0 to 4095"),
    ("logit_bias", {"٣": 1}, "invalid_value", "token ids from 0 to 4095"),
    ("logit_bias", {"07": 1}, "invalid_value", "token ids from 0 to 4095"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "invalid_value", "at most 1024 tokens"),
    ("stream", "yes", TYPE, "expected a boolean"),
    ("stream", 1, TYPE, "expected a boolean"),
    ("stream_options", {"include_usage": True}, "invalid_parameter_combination", "only allowed when 'stream'"),
    ("stream_options", [], TYPE, "expected an object"),
    ("cache_salt", "", "empty_string", "not empty"),
    ("cache_salt", 1, TYPE, "expected a string"),
    ("cache_salt", "x" * 257, "string_above_max_length", "at most 256 characters"),
    ("return_token_ids", "no", TYPE, "expected a boolean"),
    ("model", 1, TYPE, "expected a string"),
    ("model", None, "missing_required_parameter", "Missing required parameter: 'model'"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("field", "value", "code", "words"), BOTH, ids=[f"{b[0]}={b[1]!r:.20}" for b in BOTH])
async def test_fields_of_both(on: Stage, path: str, field: str, value: Any, code: str, words: str):
    ask = on.chat if path == CHAT else on.text
    check(await ask(**{field: value}), 400, code, words, field)


INSIDE = [  # the same, where the field is told with a place
    ("stop", ["a", ""], "empty_string", "not empty", "stop[1]"),
    ("stop", ["a", 1], TYPE, "expected a string", "stop[1]"),
    ("stop", ["x" * 257], "string_above_max_length", "at most 256 characters", "stop[0]"),
    ("stop", "x" * 257, "string_above_max_length", "a string of 257 characters", "stop"),
    ("logit_bias", {"5": 101}, DEC_HIGH, "expected a number <= 100", "logit_bias.5"),
    ("logit_bias", {"5": "1"}, TYPE, "expected a number", "logit_bias.5"),
    ("logit_bias", {"5": None}, TYPE, "expected a number", "logit_bias.5"),
]


@pytest.mark.parametrize(("field", "value", "code", "words", "param"), INSIDE)
async def test_places_inside_fields(on: Stage, field: str, value: Any, code: str, words: str, param: str):
    check(await on.chat(**{field: value}), 400, code, words, param)


TOOL = {"type": "function", "function": {"name": "f"}}
CHATS = [
    ({"messages": None}, "missing_required_parameter", "Missing required parameter: 'messages'", "messages"),
    ({"messages": []}, "empty_array", "at least one message", "messages"),
    ({"messages": "Hi"}, TYPE, "an array of messages", "messages"),
    ({"messages": {"role": "user"}}, TYPE, "an array of messages", "messages"),
    ({"messages": ["Hi"]}, TYPE, "an object", "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "missing_required_parameter", "messages[0].role", "messages[0].role"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, "invalid_value", "one of system", "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "Hi"}]}, "invalid_value", "one of system", "messages[0].role"),
    (
        {"messages": [{"role": "tool", "content": "Hi", "tool_call_id": 1}]},
        *(TYPE, "a string", "messages[0].tool_call_id"),
    ),
    ({"messages": [*HELLO, {"role": "user"}]}, TYPE, "a string or an array", "messages[1].content"),
    ({"messages": [{"role": "user", "content": None}]}, TYPE, "a string or an array", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, TYPE, "a string or an array", "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "empty_array", "at least one part", "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, TYPE, "an object", "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        *(TYPE, "a string", "messages[0].content[0].text"),
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "poem", "text": "a"}]}]},
        *("invalid_value", "'text'", "messages[0].content[0].type"),
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}],
                }
            ]
        },
        *("unsupported_value", "Nothing was fetched", "messages[0].content[0].type"),
    ),
    (
        {"messages": [{"role": "user", "content": "a", "__class__": "x"}]},
        *("unknown_parameter", "Unrecognized field in 'messages[0]': '__class__'", "messages[0].__class__"),
    ),
    (
        {"messages": [{"role": "user", "content": "a", "name": "a b"}]},
        *("invalid_value", "1 to 128 letters", "messages[0].name"),
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]},
        *(TYPE, "an object", "messages[0].tool_calls[0].function"),
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a b"}}]}]},
        *("invalid_value", "1 to 128 letters", "messages[0].tool_calls[0].function.name"),
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": {}}}]}]},
        *(TYPE, "a string", "messages[0].tool_calls[0].function.arguments"),
    ),
    ({"messages": [{"role": "assistant"}]}, TYPE, "a string or an array", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}]},
        *("unknown_parameter", "'tool_calls'", "messages[0].tool_calls"),
    ),
    ({"messages": HELLO * 4097}, "array_above_max_length", "at most 4096 messages", "messages"),
    ({"messages": [{"role": "user", "content": "w " * 3000}]}, "context_length_exceeded", "2048 tokens", "messages"),
    ({"messages": [{"role": "user", "content": "x" * 90_000}]}, "context_length_exceeded", "at least", "messages"),
    ({"max_completion_tokens": 8}, "invalid_parameter_combination", "at the same time", "max_tokens"),
    ({"logprobs": 1}, TYPE, "a boolean", "logprobs"),
    ({"top_logprobs": 2}, "invalid_parameter_combination", "'logprobs' to be true", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, INT_HIGH, "<= 20", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, INT_LOW, ">= 0", "top_logprobs"),
    ({"stream": True, "stream_options": {"x": 1}}, "unknown_parameter", "stream_options.x", "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, TYPE, "a boolean", "include_usage"),
    ({"tools": {}}, TYPE, "an array of tools", "tools"),
    ({"tools": [{"type": "function"}]}, TYPE, "an object", "tools[0].function"),
    ({"tools": [{"function": {"name": "a b"}}]}, "invalid_value", "1 to 128 letters", "tools[0].function.name"),
    ({"tools": [{"function": {"name": "a", "parameters": []}}]}, TYPE, "an object", "tools[0].function.parameters"),
    ({"tools": [{"function": {"name": "a"}}] * 513}, "array_above_max_length", "at most 512 tools", "tools"),
    ({"tool_choice": "required"}, "invalid_value", "only allowed when 'tools'", "tool_choice"),
    ({"tool_choice": "sometimes"}, TYPE, "'required' or an object", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "magic"}}, "invalid_value", "names a function", "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        *("invalid_value", "the name of one of 'tools', got 'other'", "tool_choice.function.name"),
    ),
    ({"parallel_tool_calls": "no"}, TYPE, "a boolean", "parallel_tool_calls"),
    ({"documents": [{"text": []}]}, TYPE, "a string or a number", "documents[0].text"),
    ({"reasoning_effort": 1}, TYPE, "a string", "reasoning_effort"),
    ({"functions": [{"name": "f"}]}, "unsupported_value", "calls 'tools', not 'functions'", "functions"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "'json_schema'", "response_format.type"),
    ({"response_format": {}}, "invalid_value", "'json_schema'", "response_format.type"),
    (
        {"response_format": {"type": "json_schema"}},
        *("missing_required_parameter", "Missing", "response_format.json_schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        *("invalid_value", "letters", "response_format.json_schema.name"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
        *(TYPE, "a JSON schema", "response_format.json_schema.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": "yes"}}},
        *(TYPE, "a boolean", "response_format.json_schema.strict"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
        *("unknown_parameter", "shema", "response_format.json_schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        *("invalid_grammar", 'Unimplemented keys: ["not"]', "response_format.json_schema.schema"),
    ),
    ({"structured_outputs": {"regex": "a(?=b)"}}, "invalid_grammar", "look-around", "structured_outputs.regex"),
    ({"structured_outputs": {"xml": "a"}}, "unsupported_value", "choice", "structured_outputs.xml"),
    ({"structured_outputs": {"choice": []}}, "empty_array", "at least one", "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, TYPE, "a string", "structured_outputs.choice[1]"),
    ({"guided_grammar": "start: a"}, "invalid_grammar", "unknown name", "guided_grammar"),
    ({"guided_json": "{"}, "invalid_json", "a JSON schema", "guided_json"),
    ({"guided_regex": "a" * 131_073}, "string_above_max_length", "131072", "guided_regex"),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        *("invalid_parameter_combination", "Only one of", "guided_regex"),
    ),
    ({"response_format": "json"}, TYPE, "an object", "response_format"),
    ({"audio": {"voice": "x"}}, "unsupported_value", "does not have it", "audio"),
    ({"modalities": ["text", "audio"]}, "unsupported_value", "text only", "modalities"),
    ({"web_search_options": {}}, "unsupported_value", "does not have it", "web_search_options"),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "not taken", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"__class__": 1}}, "invalid_value", "not taken", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": {"b": 1}}}, TYPE, "a string, number", "chat_template_kwargs.a"),
    ({"chat_template_kwargs": {"a": "x" * 257}}, "string_above_max_length", "256", "chat_template_kwargs.a"),
    ({"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}}, "invalid_value", "at most 32", "chat_template_kwargs"),
    ({"continue_final_message": True}, "invalid_value", "last message of the assistant", "continue_final_message"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        *("invalid_parameter_combination", "cannot both", "continue_final_message"),
    ),
]


@pytest.mark.parametrize(("fields", "code", "words", "param"), CHATS, ids=[str(case[0])[:50] for case in CHATS])
async def test_fields_of_chats(on: Stage, fields: dict[str, Any], code: str, words: str, param: str):
    check(await on.chat(**fields), 400, code, words, param)


TEXTS = [
    ({"prompt": None}, "missing_required_parameter", "Missing required parameter: 'prompt'", "prompt"),
    ({"prompt": ""}, "empty_prompt", "no tokens", "prompt"),
    ({"prompt": []}, "empty_array", "an empty array", "prompt"),
    ({"prompt": [[]]}, "empty_array", "at least one token id", "prompt[0]"),
    ({"prompt": 5}, TYPE, "a string", "prompt"),
    ({"prompt": {"a": 1}}, TYPE, "a string", "prompt"),
    ({"prompt": [4096]}, "invalid_value", "token ids from 0 to 4095, got 4096", "prompt"),
    ({"prompt": [5, -1]}, "invalid_value", "token ids from 0 to 4095, got -1", "prompt"),
    ({"prompt": [5, True]}, TYPE, "an integer token id, got True", "prompt"),
    ({"prompt": [5, 1.0]}, TYPE, "an integer token id, got 1.0", "prompt"),
    ({"prompt": [5, "a"]}, TYPE, "an integer token id", "prompt"),
    ({"prompt": ["a", 5]}, TYPE, "a string or an array of token ids", "prompt[1]"),
    ({"prompt": ["a"] * 65}, "array_above_max_length", "at most 64 prompts", "prompt"),
    ({"prompt": [5] * 3000}, "context_length_exceeded", "3000 in the prompt", "prompt"),
    ({"prompt": [5] * 2041}, "context_length_exceeded", "2049 tokens (2041 in the prompt, 8", "prompt"),
    ({"logprobs": True}, TYPE, "an integer", "logprobs"),
    ({"logprobs": 21}, INT_HIGH, "<= 20", "logprobs"),
    ({"logprobs": -1}, INT_LOW, ">= 0", "logprobs"),
    ({"echo": 1}, TYPE, "a boolean", "echo"),
    ({"suffix": "the end"}, "unsupported_value", "fill in the middle", "suffix"),
    ({"suffix": 1}, TYPE, "a string", "suffix"),
    ({"best_of": 3}, "unsupported_value", "'best_of' may only equal 'n'", "best_of"),
    ({"best_of": "3"}, TYPE, "an integer", "best_of"),
]


@pytest.mark.parametrize(("fields", "code", "words", "param"), TEXTS, ids=[str(case[0])[:50] for case in TEXTS])
async def test_fields_of_completions(on: Stage, fields: dict[str, Any], code: str, words: str, param: str):
    check(await on.text(**fields), 400, code, words, param)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_unknown_fields_as_openai_words_them(on: Stage, path: str):
    ask = on.chat if path == CHAT else on.text
    check(await ask(foo=1), 400, None, "Unrecognized request argument supplied: foo")
    check(await ask(foo=1, chat_template="x"), 400, None, "Unrecognized request arguments supplied: foo, chat_template")
    check(await ask(**{"max_tokens ": 1}), 400, None, "Unrecognized request argument supplied: max_tokens ")


async def test_fields_of_the_other_endpoint_are_unknown(on: Stage):
    check(await on.chat(prompt="Hi"), 400, None, "supplied: prompt")
    check(await on.text(messages=HELLO), 400, None, "supplied: messages")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_unknown_model(on: Stage, path: str):
    ask = on.chat if path == CHAT else on.text
    check(await ask(model="gpt-9"), 404, "model_not_found", "'gpt-9' does not exist. This server has", "model")


IGNORED = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k", "parallel_tool_calls": True, "reasoning_effort": "low", "verbosity": "low",
    "prediction": None, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
    "modalities": ["text"], "functions": None, "logit_bias": None, "stop": None, "n": None, "seed": None,
    "temperature": None, "stream": None, "stream_options": None, "logprobs": None, "top_logprobs": None,
}  # fmt: skip


async def test_harmless_fields_are_accepted_and_ignored():
    async with stage() as on:
        plain = (await on.chat()).json()
        for field, value in IGNORED.items():
            answer = await on.chat(**{field: value, "seed": 1, "max_tokens": 8})
            assert answer.status_code == 200, (field, answer.text)
            assert answer.json()["choices"] == plain["choices"]
        unused = [{"type": "function", "function": {"name": "f"}}]
        assert (await on.chat(tools=unused, tool_choice="none")).json()["choices"] == plain["choices"]


TOKENS = [
    ("/tokenize", {}, None, "Exactly one of", "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, None, "Exactly one of", "prompt"),
    ("/tokenize", {"prompt": 1}, TYPE, "a string", "prompt"),
    ("/tokenize", {"prompt": "a", "x": 1}, None, "Unrecognized request argument supplied: x", None),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, TYPE, "a boolean", "add_special_tokens"),
    ("/tokenize", {"messages": []}, "empty_array", "at least one", "messages"),
    ("/detokenize", {}, "missing_required_parameter", "Missing", "tokens"),
    ("/detokenize", {"tokens": "a"}, TYPE, "an array", "tokens"),
    ("/detokenize", {"tokens": [4096]}, "invalid_value", "from 0 to 4095", "tokens"),
    ("/detokenize", {"tokens": [1.0]}, TYPE, "an integer token id", "tokens"),
]


@pytest.mark.parametrize(("path", "body", "code", "words", "param"), TOKENS)
async def test_tokenizing(on: Stage, path: str, body: Any, code: str, words: str, param: str):
    check(await on.post(path, body), 400, code, words, param)
