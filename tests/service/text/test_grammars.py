from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ovmstrio.core.generation import Conversation, Grammar, GrammarKind, ToolCallDelta
from ovmstrio.text.grammars import GrammarRefused, check_grammar, check_tools, to_compact_json, tool_call_grammar
from ovmstrio.text.grammars.compact_json import (
    INTEGER,
    NUMBER,
    compact_json_rules,
    integer_range_rule,
    number_range_rule,
)
from ovmstrio.text.parsing import TOOL_PARSERS, make_parser
from tests.support.examples import examples
from tests.support.grammar_engine import GrammarEngine, grammar_engine
from tests.support.tiny_llm import write_tiny_folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarEngine]:
    """Run a real engine with a tiny model, whose texts are noise."""
    folder = write_tiny_folder(Path(tmp_path_factory.mktemp("tiny")) / "model")
    with grammar_engine(folder) as running:
        yield running


def _schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _tag(form: Any) -> Grammar:
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _tagged(schema: Any) -> Any:
    return {"begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</a>"}


_PATTERN: Final = {"type": "regex", "pattern": "b+"}
_NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": 9}
_TREE: Final = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
    "$ref": "#/$defs/node",
}
_GOOD: Final[Sequence[Grammar]] = (
    *map(
        _schema,
        (
            {},
            True,
            {"type": []},
            {"type": ["string", "null"], "minLength": 2},
            {"type": "object", "additionalProperties": True},
            {"type": "object", "properties": {"a b/\u00e9'": {"type": "null"}}, "required": ["a b/\u00e9'", "unknown"]},
            {"type": "object", "properties": {"a": True}, "minProperties": 1, "maxProperties": 1},
            {"type": "object", "patternProperties": {"^a[0-9]$": _NUMBER}, "minProperties": 2},
            {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": _NUMBER},
            {"type": "array", "prefixItems": [{"type": "null"}], "items": _NUMBER, "minItems": 1, "maxItems": 20000},
            {"type": "array", "items": False},
            {"type": "array"},
            {"items": {"type": "boolean"}},
            {"required": "a"},
            {"type": "string", "format": "date-time"},
            {"type": "string", "format": "of one's own", "minLength": 1, "maxLength": 100000},
            {"type": "string", "pattern": '^[^"\\\\]{1,10}$', "minLength": 1},
            {"type": "integer", "exclusiveMinimum": -(10**15), "exclusiveMaximum": 10**15},
            {"type": "integer", "minimum": 3.0, "maximum": 3},
            {"type": "number", "minimum": 1e-10, "maximum": 2e-10},
            {"type": "number", "maximum": 1e300},
            {"enum": ["a", 1, None, {"x": [1.5]}, '\n"/\\\u00e9\u0000']},
            {"const": {'a"': "\n"}},
            {"oneOf": [{"type": "string"}, _NUMBER]},
            {"allOf": [{"type": "string"}]},
            {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
            {"$ref": "#/$defs/\u00e9", "$defs": {"\u00e9": {"type": "null"}}},
            _TREE,
            _nested(40),
            {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(300)}},
        ),
    ),
    *(
        Grammar(GrammarKind.REGEX, pattern)
        for pattern in (
            "",
            "^a|b$",
            "(a|b)+?[\\w.-]*\\d{2,3}",
            "[^\\]a-c]",
            "[-a]",
            "[a-]",
            "[a\\-z]",
            "(?:a)(?<name>b)",
            "\\u00e9\\x41\\u{1F600}\\cA\\n\\/\\-",
            "[\\u00e9-\\u00ff\\d\\S]",
            "()",
            "a{1000000}",
            "((a{20}){20}){20}",
            "} ] \" ' # \n",
            "[a[b&&$^|]",
        )
    ),
    *(
        Grammar(GrammarKind.EBNF, grammar)
        for grammar in (
            'root ::= "a"',
            'root ::= "it\'s \\"no\\"\\n\\t\\\\" | "\\u0007\\b\\f/\u00e9"',
            'root ::= ("a" | "b"){2,3} [^a-z\\n\\]-]+ # note\n  | x.y-z\nx.y-z ::= "" | "\\x41\\u00e9" root',
            'root ::= root "a" | "b"',
            "root ::= ()",
            'root ::= "a"{1000000}',
            '\n# first\n\nroot ::= "a" (\n "b" )? "c"\n',
        )
    ),
    _tag({"type": "any_text"}),
    _tag({"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, _PATTERN]}),
    _tag({"type": "or", "elements": [{"type": "json_schema", "json_schema": _TREE}, _PATTERN]}),
    _tag({"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}),
    _tag({"type": "grammar", "grammar": 'root ::= "a"'}),
    _tag({"type": "triggered_tags", "triggers": ["<a"], "tags": [_tagged(_NUMBER)], "at_least_one": True}),
    _tag({"type": "tags_with_separator", "separator": ",", "tags": [_tagged(True)]}),
)


@pytest.mark.parametrize("grammar", _GOOD, ids=lambda grammar: grammar.text[:40])
def test_valid_grammar_passes_and_is_compiled(engine: GrammarEngine, grammar: Grammar) -> None:
    check_grammar(grammar)
    assert engine.make(grammar)[0] == ""


_BAD: Final[Sequence[tuple[Grammar, str]]] = (
    (Grammar(GrammarKind.JSON_SCHEMA, "{"), "response_format: the schema is not valid JSON"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"} x'), "not valid JSON: Extra data"),
    (Grammar(GrammarKind.JSON_SCHEMA, "[" * 100000), "not valid JSON"),
    (Grammar(GrammarKind.JSON_SCHEMA, " " * 300000), "300000 characters; at most 262144 are allowed"),
    (_schema(False), r"at \$: false allows no value"),
    (_schema([]), r"at \$: expected an object, got \[\]"),
    (_schema({"type": "str"}), r'at \$.type: expected one of string, .*null, got "str"'),
    (_schema({"type": ["string", "foo"]}), r'at \$.type: expected .*got "foo"'),
    (_schema({"properties": {"a": {"items": {"type": "int"}}}}), r"at \$.properties.a.items.type"),
    (_schema({"$ref": "#/$defs/a"}), r"'#/\$defs/a' not found"),
    (_schema({"$ref": "#/"}), "the root schema is"),
    (_schema({"$ref": "http://example.com/a"}), r"put the schema into \$defs"),
    (_schema({"$ref": 1}), "expected a string, got 1"),
    (_schema({"$ref": "#"}), "infinite recursion"),
    (
        _schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        "infinite recursion",
    ),
    (_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), r"at \$: infinite recursion"),
    (_schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "infinite recursion"),
    (_schema({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}), "infinite recursion"),
    (_schema({"anyOf": [{"properties": {"a": {"$ref": "#/anyOf/0"}}, "required": ["a"]}]}), "infinite recursion"),
    (_schema({"anyOf": [{"$ref": "#/anyOf/1"}]}), "'#/anyOf/1' not found"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "number", "minimum": NaN}'), "not valid JSON: NaN is no number"),
    (_schema({"anyOf": []}), r"at \$.anyOf: expected a list of schemas"),
    (_schema({"enum": []}), r"at \$.enum: expected a list of values"),
    (_schema({"allOf": [{"type": "string"}, {"minLength": 1}]}), "merge them into one"),
    (_schema({"properties": []}), r"at \$.properties: expected an object"),
    (_schema({"properties": {"a": False}}), "remove the property"),
    (_schema({"type": "object", "required": "a"}), "expected a list of names"),
    (_schema({"type": "object", "additionalProperties": 1}), r"at \$.additionalProperties"),
    (_schema({"type": "array", "items": [{}]}), "must be in prefixItems"),
    (_schema({"type": "array", "items": {}, "minItems": 1.5}), "expected an integer up to 20000, got 1.5"),
    (_schema({"type": "array", "items": {}, "minItems": 1000000}), "up to 20000"),
    (_schema({"type": "array", "items": {}, "minItems": 2, "maxItems": 1}), "maxItems 1 is less"),
    (_schema({"type": "string", "minLength": -1}), r"at \$.minLength"),
    (_schema({"type": "string", "minLength": 3, "maxLength": 2}), "maxLength 2 is less than minLength 3"),
    (
        _schema({"properties": {f"p{number}": {"type": "string"} for number in range(301)}}),
        r"\$\.required: more than 300 optional properties",
    ),
    (
        _schema({"anyOf": [{"type": "string", "maxLength": 400 + number} for number in range(6)]}),
        r"\$\.anyOf\[5\]: string length bounds sum to more than 1500 characters",
    ),
    (_schema({"type": "string", "maxLength": 10**9}), "1000000000 repetitions are too many"),
    (
        _schema({"type": "string", "pattern": "((a{1000}){1000}){1000}"}),
        r"at \$.pattern: .* repetitions are too many.*\(position 11 of the pattern\)",
    ),
    (_schema({"type": "integer", "minimum": True}), "expected a number, got true"),
    (_schema({"type": "integer", "minimum": 5, "exclusiveMaximum": 5}), "no number is between 5 and 4"),
    (_schema({"type": "number", "minimum": 1e300}), "remove the bound"),
    (_schema({"type": "number", "exclusiveMinimum": -5, "maximum": -5}), "no number is strictly between -5 and -5"),
    (_schema(_nested(60)), "nested more than 48 deep"),
    (_schema({"anyOf": [{"type": "string"}] * 5000}), "more than 4000 parts"),
    *(
        (Grammar(GrammarKind.REGEX, pattern), text)
        for pattern, text in (
            ("a{1000001}", "too many"),
            ("((a{50}){50}){50}", "20000 nested"),
            ("[)](\\)a{300}){200}", "60000 repetitions are too many.*position 14"),
            ("(a{" + "0" * 30 + "300}){200}", "20000 nested"),
            ("a{" + "9" * 9999 + "}", "too many"),
            ("(" * 200 + ")" * 200, "groups nested more than 100 deep .position 101"),
            ("a" * 300000, "300000 characters; at most 262144 are allowed"),
            ("\ud800", "lone surrogates"),
        )
    ),
    *(
        (Grammar(GrammarKind.EBNF, grammar), text)
        for grammar, text in (
            ('root ::= "a"{9999999}', "too many"),
            ('root ::= ("(" [(] "a"{ 300 , }) # (\n {200}', "60000 repetitions are too many"),
            ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "groups nested more than 100 deep"),
            ('root ::= "\ud800"', "lone surrogates"),
        )
    ),
    (Grammar(GrammarKind.STRUCTURAL_TAG, "x"), "not valid JSON"),
    (Grammar(GrammarKind.STRUCTURAL_TAG, "{}"), "expected .*format"),
    (_tag([]), r"at \$.format: expected an object"),
    (_tag({"type": "or", "elements": 1}), r"at \$.format.elements: expected a list"),
    (_tag({"type": "regex", "pattern": 1}), r"at \$.format.pattern: expected a string"),
    (_tag({"type": "json_schema", "json_schema": {"type": "foo"}}), r"at \$.format.json_schema.type: expected one of"),
    (_tag({"type": "triggered_tags", "tags": [_tagged({"type": "foo"})]}), r"tags\[0\].content.json_schema.type: expe"),
    (_tag({"type": "regex", "pattern": "a{1000001}"}), r"at \$.format.pattern: 1000001 repetitions"),
    (_tag({"type": "grammar", "grammar": 'root ::= "a"{1000001}'}), r"at \$.format.grammar: 1000001 repetitions"),
)


@pytest.mark.parametrize(("grammar", "text"), _BAD, ids=lambda value: getattr(value, "text", "")[:40] or "said")
def test_invalid_grammar_is_refused_with_its_place(grammar: Grammar, text: str) -> None:
    with pytest.raises(GrammarRefused, match=text) as refused:
        check_grammar(grammar)
    assert refused.value.field == "response_format"
    assert len(str(refused.value)) < 800


_NAMES = st.text(st.characters(codec="utf-8"), max_size=4)
_LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array", "int"])},
        optional={
            "minLength": st.integers(-1, 5),
            "maxLength": st.integers(0, 100),
            "pattern": st.text('ab[]()^$|*+?{}2,\\dw-."', max_size=6),
            "format": st.sampled_from(["date", "time", "email", "uuid", "ipv4", "uri", "hostname", "x"]),
            "minimum": st.integers(-1000, 1000) | st.floats(-1e6, 1e6),
            "maximum": st.integers(-1000, 1000) | st.floats(-1e6, 1e6),
            "exclusiveMinimum": st.integers(-50, 50),
            "enum": st.lists(_NAMES | st.integers() | st.none(), max_size=3),
        },
    ),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/properties/a", "#/$defs/b", "#/items"])}),
    st.fixed_dictionaries({"const": st.recursive(_NAMES | st.integers(), lambda inner: st.lists(inner, max_size=2))}),
)


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(["a", "b"]) | _NAMES, inner, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["object", ["object", "null"]])},
            optional={
                "properties": named,
                "required": st.lists(st.sampled_from(["a", "b", "c"]), max_size=2),
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(st.sampled_from(["^a", "[", "b+$"]), inner, max_size=1),
                "minProperties": st.integers(0, 3),
                "maxProperties": st.integers(0, 3),
                "$defs": st.fixed_dictionaries({"b": inner}),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": inner,
                "prefixItems": st.lists(inner, max_size=2),
                "minItems": st.integers(0, 4),
                "maxItems": st.integers(0, 4),
            },
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, max_size=2)}),
    )


_SCHEMAS = st.recursive(_LEAVES, _grown, max_leaves=8)
_PATTERNS = st.text("ab[]()^$|*+?{}12,\\dwSnu0.-\"'\n#é:<=!", max_size=10)
_PARTS: Final = (
    "root ::= ",
    "x ::= ",
    '"a"',
    "x",
    "root",
    "[a-z]",
    "(",
    ")",
    " | ",
    "*",
    "+",
    "?",
    "{2}",
    "{1,3}",
    "\n",
    " ",
)
_RULES = st.lists(st.sampled_from(_PARTS), max_size=14).map(lambda parts: "root ::= " + "".join(parts))


_GRAMMARS = st.one_of(
    _SCHEMAS.map(_schema),
    _PATTERNS.map(lambda pattern: Grammar(GrammarKind.REGEX, pattern)),
    _RULES.map(lambda rules: Grammar(GrammarKind.EBNF, rules)),
)


@settings(max_examples=examples(450), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(grammar=_GRAMMARS)
def test_engine_survives_any_grammar_that_passes(engine: GrammarEngine, grammar: Grammar) -> None:
    try:
        check_grammar(grammar)
    except GrammarRefused:
        return
    engine.make(grammar, tokens=2)
    line = to_compact_json(grammar)
    if line.kind is not grammar.kind:
        check_grammar(line)
        assert engine.make(line, tokens=2)[0] == "", line.text


@settings(max_examples=examples(200), deadline=None)
@given(
    text=st.text(max_size=30),
    kind=st.sampled_from([kind for kind in GrammarKind if kind is not GrammarKind.JSON_OBJECT]),
)
def test_any_text_passes_or_is_refused(text: str, kind: GrammarKind) -> None:
    with suppress(GrammarRefused):
        check_grammar(Grammar(kind, text))


_FLAGS: Final = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}, "exact": {"type": "boolean"}},
    "required": ["size", "exact"],
}
_TOOLS: Final = (
    {"type": "function", "function": {"name": "measure", "parameters": _FLAGS}},
    {"type": "function", "function": {"name": "rest", "parameters": {"type": "object", "properties": {}}}},
)


def _called(name: str, text: str, tools: Sequence[Any] = _TOOLS) -> tuple[str, list[tuple[str, str]]]:
    parser = make_parser(name, "none", tools=tools)
    deltas = [*parser.feed(text), *parser.finish()]
    calls: list[ToolCallDelta] = [call for delta in deltas for call in delta.calls]
    names = [call.name for call in calls if call.name]
    found = [
        (name, "".join(call.arguments for call in calls if call.index == index)) for index, name in enumerate(names)
    ]
    return "".join(delta.text + delta.reasoning for delta in deltas), found


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name != "auto"])
def test_forced_call_is_made_and_parsed(engine: GrammarEngine, name: str) -> None:
    conversation = Conversation((), _TOOLS, tool_choice="function", tool_name="measure")
    imposed = tool_call_grammar(conversation, name)
    assert imposed is not None
    assert imposed.forced
    check_grammar(imposed.grammar)
    for seed in range(30):
        error, text = engine.make(imposed.grammar, tokens=160, seed=seed)
        assert error == ""
        content, calls = _called(imposed.tool_parser, text)
        assert [call[0] for call in calls] == ["measure"]
        assert content == ""
        if name == "qwen3coder" and "</tool_call>" not in text:
            continue  # a tiny model may write blanks up to the end, which that form has room for
        arguments = json.loads(calls[0][1])
        assert arguments["size"] in {1, 2}
        assert isinstance(arguments["exact"], bool)
        return
    pytest.fail("no call ended")


def test_required_call_is_of_any_function(engine: GrammarEngine) -> None:
    imposed = tool_call_grammar(Conversation((), _TOOLS, tool_choice="required"), "hermes3")
    assert imposed is not None
    made = {_called("hermes3", engine.make(imposed.grammar, tokens=80, seed=seed)[1])[1][0][0] for seed in range(20)}
    assert made <= {"measure", "rest"}


def test_guided_calls_leave_content_free(engine: GrammarEngine) -> None:
    conversation = Conversation((), _TOOLS)
    assert tool_call_grammar(conversation, "hermes3") is None
    assert tool_call_grammar(Conversation((), ()), "hermes3", guided=True) is None
    assert tool_call_grammar(Conversation((), _TOOLS, tool_choice="none"), "hermes3", guided=True) is None
    imposed = tool_call_grammar(conversation, "hermes3", guided=True)
    assert imposed is not None
    assert not imposed.forced
    assert engine.make(imposed.grammar, tokens=20)[0] == ""
    assert tool_call_grammar(conversation, "lfm2", guided=True) is None
    strict = {"type": "function", "function": {**_TOOLS[0]["function"], "strict": True}}  # type: ignore[dict-item]
    some = tool_call_grammar(Conversation((), (strict, _TOOLS[1])), "hermes3")
    assert some is not None
    one, other = json.loads(some.grammar.text)["format"]["tags"]
    assert one["content"] == {"type": "grammar", "grammar": compact_json_rules(_FLAGS)}
    assert other["content"]["grammar"] == compact_json_rules({"type": "object", "additionalProperties": True})


def test_tool_of_an_invalid_schema_is_named() -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "int"}}}}}
    conversation = Conversation((), (_TOOLS[0], bad), tool_choice="function", tool_name="bad")
    with pytest.raises(GrammarRefused, match=r"at \$.properties.a.type: expected one of") as refused:
        tool_call_grammar(conversation, "generic")
    assert refused.value.field == "tools[1].function.parameters"


def _tool(parameters: Any, **more: Any) -> Conversation:
    function = {"name": "f", "parameters": parameters, **more}
    return Conversation((), (_TOOLS[0], {"type": "function", "function": function}))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"type": "string"}, r'\$.type: expected "object", got "string"'),
        ({"type": "dict"}, r'\$.type: expected one of string, .*got "dict"'),
        ({"properties": {"a": {"type": "int"}}}, r'\$.properties.a.type: expected one of .*got "int"'),
        ({"properties": {"a": {"type": ["string", "any"]}}}, r"\$.properties.a.type"),
        ({"properties": {"a": "string"}}, r'\$.properties.a: expected an object, got "string"'),
        ({"properties": ["a"]}, r"\$.properties: expected an object"),
        ({"required": True}, r"\$.required: expected a list of names, got true"),
        ({"properties": {"a": {"type": "array", "items": "string"}}}, r"\$.properties.a.items: expected an object"),
        ({"properties": {"a": {"enum": "x"}}}, r"\$.properties.a.enum: expected a list of values"),
        ({"properties": {"a": {"anyOf": {}}}}, r"\$.properties.a.anyOf: expected a list of schemas"),
        ({"properties": {"a": {"minimum": "1"}}}, r"\$.properties.a.minimum: expected a number"),
        ({"properties": {"a": {"maxLength": 1.5}}}, r"\$.properties.a.maxLength: expected an integer"),
        ({"$defs": {"b": {"type": "x"}}}, r"\$.\$defs.b.type"),
        ({"properties": {"a": {"not": {"items": [{"type": "x"}]}}}}, r"\$.properties.a.not.items\[0\].type"),
    ],
)
def test_parameters_of_a_wrong_type_are_refused_with_their_path(parameters: Any, text: str) -> None:
    with pytest.raises(GrammarRefused, match=text) as refused:
        check_tools(_tool(parameters))
    assert refused.value.field == "tools[1].function.parameters"


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": ["object", "null"], "properties": None, "required": None},
        {"properties": {"type": {"type": "string"}, "required": {"enum": [1]}}, "required": ["type"]},
        {"properties": {"a": {"not": {"const": 1}, "allOf": [{}, {"multipleOf": 2}], "x-more": "x", "default": "y"}}},
    ],
)
def test_any_other_schema_of_an_object_is_allowed(parameters: Any) -> None:
    check_tools(_tool(parameters))


_NOT_IMPOSED: Final[Sequence[tuple[Any, str]]] = (
    ({"type": "integer", "multipleOf": 5}, "multipleOf"),
    ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "items": {}, "contains": {"const": 1}}, "contains"),
    ({"type": "object", "properties": {"b": {}}, "dependentRequired": {"b": ["c"]}}, "dependentRequired"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
    ({"type": "object", "required": ["b"]}, "required"),
    ({"anyOf": [{"type": "object"}], "required": ["b"]}, "required"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 5}, "maxLength"),
    ({"$ref": "#/$defs/d", "minLength": 5}, "minLength"),
    ({"type": "string", "pattern": "a+", "maxLength": 5}, "maxLength"),
    ({"type": "string", "format": "date", "pattern": "^2.*$"}, "pattern"),
    ({"type": "object", "properties": {"b": {}}, "patternProperties": {"c": {}}}, "properties"),
    ({"type": "object", "propertyNames": {"pattern": "a"}, "additionalProperties": {"type": "null"}}, "additionalPro"),
    ({"type": "number", "minimum": 0.5}, "minimum"),
    ({"type": "string", "enum": ["a", 1]}, "type"),
)


@pytest.mark.parametrize(("part", "word"), _NOT_IMPOSED)
def test_parts_that_are_not_imposed_are_refused_in_strict_schemas_only(part: Any, word: str) -> None:
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"], "$defs": {"d": {"type": "string"}}}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    check_grammar(grammar)
    check_tools(_tool(schema))
    with pytest.raises(GrammarRefused, match=rf"at \$\.properties\.a\.{word}.*the engine"):
        check_grammar(replace(grammar, is_strict=True))
    with pytest.raises(GrammarRefused, match=rf"at \$\.properties\.a\.{word}.*the engine"):
        check_tools(_tool(schema, strict=True))


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"type": "text", "enum": ["a"]}, "type"),
        ({"type": [["string"]], "const": "a"}, "type"),
        ({"const": 1, "enum": 5}, "enum"),
        ({"type": "string", "format": ["date"]}, "format"),
    ],
)
def test_wrong_values_of_any_keyword_are_refused_in_strict_schemas(part: Any, word: str) -> None:
    grammar = _schema({"type": "object", "properties": {"a": part}})
    with pytest.raises(GrammarRefused, match=rf"at \$\.properties\.a\.{word}: expected"):
        check_grammar(replace(grammar, is_strict=True))


@pytest.mark.parametrize(
    ("schema", "accepted"),
    [
        ({"type": "number", "minimum": 0.5, "maximum": 2.5}, range(4)),
        ({"type": "number", "exclusiveMinimum": -0.5, "maximum": 0.25}, range(-1, 2)),
        ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3.5}, range(1, 4)),
        ({"type": "integer", "exclusiveMinimum": 0.5, "maximum": 3.5}, range(1, 4)),
    ],
)
def test_bounds_that_are_not_integers_are_imposed_rounded(engine: GrammarEngine, schema: Any, accepted: range) -> None:
    for seed in range(4):
        error, text = engine.make(to_compact_json(_schema(schema)), tokens=20, seed=seed)
        assert error == ""
        assert accepted[0] <= json.loads(text) <= accepted[-1]


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"$ref": "#/$defs/a", "$defs": {"a": _FLAGS}}])
def test_arguments_of_a_function_without_a_schema_are_any_object(engine: GrammarEngine, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    imposed = tool_call_grammar(Conversation((), (tool,), tool_choice="required"), "devstral")
    assert imposed is not None
    error, text = engine.make(imposed.grammar, tokens=30)
    assert error == ""
    assert text.startswith("[TOOL_CALLS]f[ARGS]{")


SHORT: Final = Field(max_length=2)


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Part(_Closed):
    word: Literal['"', "\\", "é", "/"]
    more: _Part | None = None


class _Thing(_Closed):
    name: Annotated[str, Field(min_length=1, max_length=4)]
    size: Annotated[int, Field(ge=-20, lt=137)]
    share: Annotated[float, Field(ge=0, le=1)] = 0
    price: Annotated[float, Field(gt=0)] | None = None
    tags: Annotated[list[Literal["a", "b"]], SHORT] = []
    pair: tuple[bool, None]
    part: _Part


class _Optional(_Closed):
    a: bool = True
    b: Annotated[int, Field(ge=0, le=3)] = 0
    c: None = None


SHAPES: Final[tuple[Any, ...]] = (
    _Thing,
    _Optional,
    Annotated[list[_Optional], Field(min_length=1, max_length=3)],
    Annotated[dict[str, bool], Field()],
    Literal[1, "a", True] | None,
    int | bool | None,
    float,
)


ENDLESS: Final = (SHAPES[0], SHAPES[3])  # one contains itself, the other has any number of names


def _is_whole(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noise_on_one_line_fits_its_schema(engine: GrammarEngine, shape: Any) -> None:
    adapter = TypeAdapter(shape)
    grammar = to_compact_json(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(adapter.json_schema())))
    assert grammar.kind is GrammarKind.EBNF
    check_grammar(grammar)
    ended = 0
    for seed in range(6):
        error, text = engine.make(grammar, tokens=400, seed=seed)
        assert error == ""
        assert "\n" not in text
        assert "  " not in re.sub(r'"(\\.|[^"\\])*"', "", text)
        if shape in ENDLESS and not _is_whole(text):
            continue
        adapter.validate_json(text)
        ended += 1
    assert ended


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strict_schemas_of_pydantic_are_accepted(shape: Any) -> None:
    check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(TypeAdapter(shape).json_schema()), is_strict=True))


@pytest.mark.parametrize("length", [0, 1, 2, 127, 128, 129, 300])
def test_string_has_the_characters_of_its_bounds(engine: GrammarEngine, length: int) -> None:
    """Strings of more than 128 characters are counted in blocks; noise may be no UTF-8, so it is narrowed to ASCII."""
    for bounds in ({"minLength": length, "maxLength": length}, {"minLength": length}, {"maxLength": length}):
        rules = to_compact_json(_schema({"type": "string", **bounds})).text
        narrowed = Grammar(GrammarKind.EBNF, rules.replace(r'[^"\\\x00-\x1f]', "[a-z ]"))
        assert narrowed.text != rules or length == 0
        for seed in range(4):
            error, text = engine.make(narrowed, tokens=2000, seed=seed)
            assert error == ""
            assert bounds.get("minLength", 0) <= len(json.loads(text)) <= bounds.get("maxLength", 2000), (bounds, text)


def test_json_object_is_on_one_line(engine: GrammarEngine) -> None:
    grammar = to_compact_json(Grammar(GrammarKind.JSON_OBJECT, ""))
    check_grammar(grammar)
    for seed in range(4):
        error, text = engine.make(grammar, tokens=60, seed=seed)
        assert error == ""
        assert text.startswith("{")
        assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*("|$)|(?<=[:,]) ', "", text))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date"},
        {"type": "string", "pattern": "a+"},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}},
        {"type": "object", "minProperties": 1, "additionalProperties": True},
        {"type": "string", "maxLength": 100_000},
        {"type": "object", "required": ["a"]},
    ],
)
def test_unsupported_schema_is_left_to_the_library(schema: Any) -> None:
    given = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert to_compact_json(given) is given


_WIDE: Final = {"minimum": -(2**53) + 1, "exclusiveMaximum": 2**63}


def test_bounds_beyond_all_numbers_are_dropped(engine: GrammarEngine) -> None:
    whole = {"type": "integer", **_WIDE}
    line = to_compact_json(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(whole)))
    assert line == to_compact_json(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}'))

    parts = {"a": whole, "b": {"type": "string", "format": "date"}, "c": {"const": {"minimum": -(2**60)}}}
    schema = {"type": "object", "properties": parts, "required": [*parts]}
    left = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    check_grammar(left)
    given = to_compact_json(left)
    assert json.loads(given.text)["properties"] == {**parts, "a": {"type": "integer"}}
    assert engine.make(given, tokens=4)[0] == ""


def test_referenced_rules_are_written_once() -> None:
    part = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}}
    rules = compact_json_rules({**part, "$defs": {"n": {"enum": ["once"]}}})
    assert rules is not None
    assert rules.count("once") == 1


def test_references_are_json_pointers(engine: GrammarEngine) -> None:
    references = ("#/properties/a/anyOf/1", "#/$defs/x~1y~0", "#/$defs/Page%5Bint%5D", "#/$defs/50%25")
    schema = {
        "type": "array",
        "prefixItems": [{"$ref": reference} for reference in references],
        "properties": {"a": {"anyOf": [{"const": 0}, {"const": 1}]}},
        "$defs": {"x/y~": {"const": 2}, "Page[int]": {"const": 3}, "50%25": {"const": 4}},
    }
    grammar = _schema(schema)
    check_grammar(grammar)
    error, text = engine.make(to_compact_json(grammar), tokens=60)
    assert (error, json.loads(text)) == ("", [1, 2, 3, 4])


def _pattern(rule: str) -> re.Pattern[str]:
    tokens = re.findall(r'"([^"]*)"|(\[[^]]*\](?:\{[^}]*\})?|[()|?*]|\{[^}]*\})', rule)
    return re.compile("".join(sign or f"(?:{re.escape(text)})" for text, sign in tokens))


BOUND = st.none() | st.integers(-1200, 1200) | st.integers(-11, 11)


@given(BOUND, BOUND, st.integers(-1500, 1500))
def test_pattern_of_integers_matches_numbers_within_bounds_only(a: int | None, b: int | None, value: int) -> None:
    least, most = (a, b) if a is None or b is None else sorted((a, b))
    written = _pattern(integer_range_rule(least, most))
    for each in {value, *(bound + step for bound in (a, b) if bound is not None for step in (-1, 0, 1))}:
        fits = (least is None or each >= least) and (most is None or each <= most)
        assert bool(written.fullmatch(str(each))) == fits, each


@given(BOUND, BOUND, st.integers(-6000, 6000), st.booleans(), st.booleans())
def test_pattern_of_numbers_matches_numbers_within_bounds_only(
    a: int | None, b: int | None, quarters: int, above: bool, below: bool
) -> None:
    least, most = (a, b) if a is None or b is None else sorted((a, b))
    if least == most and (above or below):
        return
    written = _pattern(
        number_range_rule(least, most, above=above and least is not None, below=below and most is not None)
    )
    near = [bound + step / 4 for bound in (a, b, 0) if bound is not None for step in (-4, -1, 0, 1, 4)]
    for each in [quarters / 4, *near]:
        over = least is None or each > least or (each == least and not above)
        under = most is None or each < most or (each == most and not below)
        text = f"{each:g}"
        found = written.fullmatch(text) or (each == 0 and written.fullmatch("-0"))
        assert bool(found) == (over and under), text


def test_patterns_of_numbers_are_bounded() -> None:
    assert not _pattern(INTEGER).fullmatch("1" * 16)
    assert _pattern(INTEGER).fullmatch("-" + "1" * 15)
    assert _pattern(NUMBER).fullmatch("-0.5e-10")
    assert not _pattern(NUMBER).fullmatch("0." + "1" * 16)
    assert not _pattern(NUMBER).fullmatch("01")
