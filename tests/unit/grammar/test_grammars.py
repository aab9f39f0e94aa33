"""Every language of grammars, tool calls, and how an answer goes along them token by token."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from msgspec import structs

from grammar_world import BYTES, END, admits, allowed, compiled, grammar_of, schema_grammar, wander
from penstock.errors import GrammarRefused
from penstock.grammar import matcher as matching
from penstock.grammar.matcher import CompiledGrammar, mask_words, token_trie
from penstock.grammar.sources import ToolCallSyntax, ToolFunction, tool_call_grammar
from penstock.types import Grammar, GrammarKind

CHOICES = ["yes", "no.", "a|b", "a\nb", "é😀", "(x)[y]{z}^$*+?\\", "#&-~/ ", "<|end|>"]
EBNF = 'root ::= "a" item*\nitem ::= [0-9]+ ","'
LARK = 'start: "say: " WORD (" " WORD)*\nWORD: /[a-z]+/\n'


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("choice", json.dumps(CHOICES), CHOICES, ["ye", "noX", "a", "yesno.", ""]),
        ("regex", "[a-c]+(-\\d{2})?", ["abc", "a-12"], ["", "d", "a-1"]),
        ("regex", "^x$|/y/", ["x", "/y/"], ["xy"]),
        ("lark", LARK, ["say: a", "say: a bc d"], ["say: ", "say: A"]),
        ("ebnf", EBNF, ["a", "a12,3,"], ["b", "a1"]),
        ("json_schema", '{"type": "object"}', ["{}", '{ "a": [1, null]\n}'], ["[]", "{", "{}  x"]),
    ],
)
def test_languages(kind: str, text: str, good: list[str], bad: list[str]) -> None:
    grammar = compiled(grammar_of(kind, text))
    assert grammar.failure is None
    assert [one for one in good if not admits(grammar, one)] == []
    assert [one for one in bad if admits(grammar, one)] == []


def test_compact_json_has_no_white_space() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    compact, loose = compiled(schema_grammar(schema, compact=True)), compiled(schema_grammar(schema))
    assert admits(compact, '{"a":[1,2]}')
    assert not admits(compact, '{"a": [1,2]}')
    assert admits(loose, '{\n    "a": [\r\n\t1, 2 ]\n}')
    assert not admits(loose, '{\n\n"a":[]}')  # no model gets lost in white space


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (
            "regex",
            "a(?=b)",
            'invalid regex "a(?=b)": look-around, including look-ahead and look-behind, is not supported',
        ),
        ("regex", "(a)\\1", "backreferences are not supported"),
        ("lark", "start: a\n", 'at 1(8): unknown name: "a"'),
        ("lark", 'start: "a"\n%llguidance {"no_forcing": false}', "%llguidance"),
        ("ebnf", "root ::= (", "at line 1"),
        ("json_schema", '{"type": "objekt"}', "Invalid type: objekt"),
    ],
)
def test_reasons_are_one_line_and_name_the_fault(kind: str, text: str, reason: str) -> None:
    failure = compiled(grammar_of(kind, text)).failure
    assert failure is not None
    assert reason in failure
    assert "\n" not in failure
    with pytest.raises(GrammarRefused) as raised:
        compiled(grammar_of(kind, text)).matcher()
    assert str(raised.value) == failure


def test_the_end_is_allowed_where_the_grammar_is_complete_and_nowhere_else() -> None:
    matcher = compiled(grammar_of("regex", "ab+")).matcher()
    told = []
    for char in b"abb":
        told.append(END in allowed(matcher))
        assert matcher.accept_tokens([char])
    assert told == [False, False, True]
    assert matcher.accept_tokens([END])
    assert allowed(matcher) == [END]
    choice = compiled(grammar_of("choice", '["yes"]')).matcher()
    assert choice.accept_tokens(list(b"yes"))
    assert allowed(choice) == [END]


def test_tokens_can_be_given_back() -> None:
    grammar = compiled(schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}}))
    matcher = grammar.matcher()
    masks = []
    for char in b'{"a": 1':
        masks.append(matcher.mask())
        assert matcher.accept_tokens([char])
    for count in range(1, len(masks)):
        other = grammar.matcher()
        assert other.accept_tokens(list(b'{"a": 1'))
        other.rollback(count)
        assert other.mask() == masks[-count]


def test_a_token_that_is_not_allowed_is_a_failure_for_good() -> None:
    matcher = compiled(grammar_of("regex", "ab")).matcher()
    assert not matcher.accept_tokens([ord("x")])
    assert matcher.failure


WEATHER = ToolFunction(
    name="get_weather",
    parameters={"properties": {"city": {"enum": ["Bern", "Rom"]}}, "required": ["city"], "additionalProperties": False},
)
CLOCK = ToolFunction(name="clock")
NAMED = ToolCallSyntax(before_name=('{"name": "',), after_name=('", "arguments": ',), after_call=("}",))
HERMES = structs.replace(
    NAMED, before_name=('<tool_call>\n{"name": "',), after_call=("}\n</tool_call>",), between=("\n",)
)
LISTED = structs.replace(NAMED, begin=(END - 1, "["), between=(", ",), end=("]",))


def test_tool_calls() -> None:
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    other = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    single = compiled(tool_call_grammar([WEATHER, CLOCK], HERMES, several=False))
    several = compiled(tool_call_grammar([WEATHER, CLOCK], HERMES, several=True))
    assert single.failure is None
    for text in (one, other):
        assert admits(single, text)
        assert not admits(single, f"{text}\n{text}")
    assert admits(several, f"{one}\n{other}\n{one}")
    for text in ("", "Hello", one.replace("Rom", "Rio"), one.replace("get_weather", "get"), f"{one}\n", f"{one}{one}"):
        assert not admits(several, text)
    for seed in range(20):
        text = wander(single, seed, most=400)
        if text is not None:
            call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            assert call["name"] in ("get_weather", "clock")


def test_control_tokens_of_a_call_are_tokens_not_text() -> None:
    grammar = compiled(tool_call_grammar([CLOCK], LISTED, several=True))
    matcher = grammar.matcher()
    assert allowed(matcher) == [END - 1]
    assert matcher.accept_tokens(
        [END - 1, *b'[{"name": "clock", "arguments": {"x": 1}}, {"name": "clock", "arguments": {}}]']
    )
    assert allowed(matcher) == [END]
    assert len(BYTES.tokens) > END


def test_a_tool_may_have_as_many_properties_as_a_schema() -> None:
    names = [f"p{number}" for number in range(200)]
    parameters = {"properties": {name: {"type": "string"} for name in names}}
    call = '<tool_call>\n{"name": "many", "arguments": {"p0": "a", "p199": "b"}}\n</tool_call>'
    assert admits(
        compiled(tool_call_grammar([ToolFunction(name="many", parameters=parameters)], HERMES, several=False)), call
    )


def test_a_tool_that_cannot_be_followed_is_named() -> None:
    with pytest.raises(ValueError, match="tool 'bad': 'minProperties'"):
        tool_call_grammar([CLOCK, ToolFunction(name="bad", parameters={"minProperties": 1})], HERMES, several=False)
    with pytest.raises(ValueError, match="no tool"):
        tool_call_grammar([], HERMES, several=True)


@pytest.mark.parametrize(("kind", "text"), [("ebnf", EBNF), ("regex", "[a-c]+"), ("json_schema", '{"type": "object"}')])
@pytest.mark.parametrize("more", [0, 16])  # 272 tokens, and 288: whole words
def test_every_answer_begins_with_the_mask_that_was_made_when_compiling(kind: str, text: str, more: int) -> None:
    vocabulary = structs.replace(BYTES, tokens=[*BYTES.tokens, *(b"#%d#" % i for i in range(more))])
    grammar = CompiledGrammar(grammar_of(kind, text), token_trie(vocabulary))
    one, words = grammar.matcher(), np.zeros(mask_words(len(vocabulary.tokens)), np.uint32)
    assert one.write_mask(words)
    first = words.tobytes()
    assert first == one.mask()[: words.nbytes]  # worked out anew
    (token, *_) = allowed(one)
    assert one.accept_tokens([token])
    assert one.write_mask(words)
    assert words.tobytes() == one.mask()[: words.nbytes]
    one.rollback(1)
    assert one.write_mask(words)
    assert words.tobytes() == first == one.mask()[: words.nbytes]


PROPERTIES = schema_grammar(
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(40)}, "additionalProperties": False}
)
AMBIGUOUS = Grammar(kind=GrammarKind.LARK, text='start: x\nx: "a" | x x | x x x')


@pytest.mark.parametrize(
    ("bound", "value", "grammar", "text", "reason"),
    [
        ("MAX_GRAMMAR_SIZE", 100, PROPERTIES, "", r"grammar size \(number of symbols\) too big .* 100"),
        ("FIRST_LEXER_FUEL", 10, PROPERTIES, "", r"\(grammar\) too big .* 10"),
        ("MAX_LEXER_STATES", 5, PROPERTIES, '{"p1": "abc", ', "too many states: .* >= 5"),
        ("STEP_LEXER_FUEL", 10, PROPERTIES, '{"p1": "abc", ', "too many expressions"),
        ("STEP_MAX_ITEMS", 20, AMBIGUOUS, "aaaaaaaa", "Too many items .limit 20"),
        ("MAX_ITEMS_IN_ROW", 10, PROPERTIES, '{"p1": "abc", ', "Current row has .* max is 10"),
        ("MAX_ITEMS_IN_ROW_OF_RULES", 10, AMBIGUOUS, "aaaaaaaa", "Current row has .* max is 10"),
    ],
)
def test_each_bound_of_a_grammar_is_one(
    monkeypatch: pytest.MonkeyPatch, bound: str, value: int, grammar: Grammar, text: str, reason: str
) -> None:
    """What compiles and is followed as it is, is refused in the bound's own words once it is beyond it."""

    def follow() -> str | None:
        try:
            following = compiled(grammar).matcher()
        except GrammarRefused as refused:
            return str(refused)
        for token in text.encode():
            if following.accept_tokens([token]):
                following.mask()
        return following.failure

    assert follow() is None
    monkeypatch.setattr(matching, bound, value)
    failure = follow()
    assert failure is not None
    assert re.search(reason, failure), failure
