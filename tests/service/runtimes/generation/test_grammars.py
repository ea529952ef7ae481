"""What passes the check of grammars is compiled by the engine, and what is refused says where it is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ovmstrio.core.generation import CallDelta, Conversation, Grammar, GrammarKind
from ovmstrio.runtimes.generation.grammars import GrammarRefused, check_grammar, impose_calls, on_one_line
from ovmstrio.runtimes.generation.grammars.one_line import one_line_rules
from ovmstrio.runtimes.generation.parsing import TOOL_PARSERS, make_parser
from tests.support.examples import examples
from tests.support.grammar_engine import GrammarEngine, grammar_engine
from tests.support.tiny_llm import write_tiny_folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarEngine]:
    """A real engine with a tiny model."""
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
            'root ::= ("a" | "b"){2,3} [^a-z\\n\\]-]+ # note\n  | x.y-z\nx.y-z ::= "" | "\\x41\\u00e9" root',
            'root ::= root "a" | "b"',
            "root ::= ()",
            'root ::= "a"{1000000}',
            '\n# first\n\nroot ::= "a" (\n "b" )? "c"\n',
        )
    ),
    _tag({"type": "any_text"}),
    _tag(
        {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b+"}]}
    ),
    _tag(
        {"type": "or", "elements": [{"type": "json_schema", "json_schema": _TREE}, {"type": "regex", "pattern": "a"}]}
    ),
    _tag({"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}),
    _tag({"type": "grammar", "grammar": 'root ::= "a"'}),
    _tag(
        {
            "type": "triggered_tags",
            "triggers": ["<a"],
            "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": _NUMBER}, "end": ""}],
            "at_least_one": True,
        }
    ),
    _tag(
        {
            "type": "tags_with_separator",
            "separator": ",",
            "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": True}, "end": "</a>"}],
        }
    ),
)


@pytest.mark.parametrize("grammar", _GOOD, ids=lambda grammar: grammar.text[:40])
def test_what_can_be_imposed_passes_and_is_compiled(engine: GrammarEngine, grammar: Grammar) -> None:
    """By the real engine, and within a bound."""
    check_grammar(grammar)
    assert engine.make(grammar)[0] == ""


_BAD: Final[Sequence[tuple[Grammar, str]]] = (
    (Grammar(GrammarKind.JSON_SCHEMA, "{"), "response_format: the schema is no JSON"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"} x'), "no JSON: Extra data"),
    (Grammar(GrammarKind.JSON_SCHEMA, "[" * 100000), "no JSON"),
    (Grammar(GrammarKind.JSON_SCHEMA, " " * 300000), "300000 letters, where 262144 are the most"),
    (_schema(False), r"at \$: false takes no value"),
    (_schema([]), r"at \$: expected an object, got \[\]"),
    (_schema({"type": "str"}), r'at \$.type: expected one of string, .*null, got "str"'),
    (_schema({"type": ["string", "foo"]}), r'at \$.type: expected .*got "foo"'),
    (_schema({"type": None}), "got null"),
    (_schema({"properties": {"a": {"items": {"type": "int"}}}}), r"at \$.properties.a.items.type"),
    (_schema({"$ref": "#/$defs/a"}), r"there is nothing at '#/\$defs/a'"),
    (_schema({"$ref": "#/"}), "names nothing"),
    (_schema({"$ref": "http://example.com/a"}), r"put the schema into \$defs"),
    (_schema({"$ref": 1}), "expected a text, got 1"),
    (_schema({"$ref": "#"}), "it needs itself"),
    (
        _schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        "it needs itself",
    ),
    (_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), r"at \$: it needs itself"),
    (_schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "it needs itself"),
    (_schema({"anyOf": []}), r"at \$.anyOf: expected a list of schemas"),
    (_schema({"enum": []}), r"at \$.enum: expected a list of values"),
    (_schema({"enum": 1}), "expected a list of values"),
    (_schema({"allOf": [{"type": "string"}, {"minLength": 1}]}), "write them as one"),
    (_schema({"properties": []}), r"at \$.properties: expected an object"),
    (_schema({"properties": {'a"': {}}}), "a letter that cannot be imposed in names"),
    (_schema({"properties": {"a": False}}), "leave the property out"),
    (_schema({"type": "object", "required": "a"}), "expected a list of names"),
    (_schema({"type": "object", "additionalProperties": 1}), r"at \$.additionalProperties"),
    (_schema({"type": "object", "patternProperties": {"(": {}}}), "a group is not closed"),
    (_schema({"type": "object", "propertyNames": {"type": "integer"}}), "names are of the type string"),
    (_schema({"type": "object", "minProperties": 1}), "allow others by additionalProperties"),
    (_schema({"type": "object", "maxProperties": 0, "required": ["a"]}), "maxProperties 0 is less"),
    (_schema({"type": "array", "items": [{}]}), "is called prefixItems"),
    (_schema({"type": "array", "minItems": 1}), "say by items what they are"),
    (_schema({"type": "array", "items": {}, "minItems": 1.5}), "expected a whole number up to 20000, got 1.5"),
    (_schema({"type": "array", "items": {}, "minItems": 1000000}), "up to 20000"),
    (_schema({"type": "array", "items": {}, "minItems": 2, "maxItems": 1}), "maxItems 1 is less"),
    (_schema({"type": "string", "minLength": -1}), r"at \$.minLength"),
    (_schema({"type": "string", "minLength": 3, "maxLength": 2}), "maxLength 2 is less than minLength 3"),
    (
        _schema({"properties": {f"p{number}": {"type": "string"} for number in range(301)}}),
        r"\$\.required: more than 300 properties may be left out",
    ),
    (
        _schema({"anyOf": [{"type": "string", "maxLength": 400 + number} for number in range(6)]}),
        r"\$\.anyOf\[5\]: lengths of texts are bounded to more than 1500 letters together",
    ),
    (_schema({"type": "string", "maxLength": 10**9}), "1000000000 repetitions are too many"),
    (_schema({"type": "string", "pattern": "a{2}{3}"}), r"at \$.pattern: two repetitions.*\(letter 5 of the pattern\)"),
    (_schema({"type": "integer", "minimum": 1.5}), "expected a whole number, got 1.5"),
    (_schema({"type": "integer", "minimum": True}), "expected a number, got true"),
    (_schema({"type": "integer", "minimum": 5, "exclusiveMaximum": 5}), "no number is from 5 to 4"),
    (_schema({"type": "number", "minimum": 1e300}), "leave the bound out"),
    (_schema({"type": "number", "exclusiveMinimum": -5, "maximum": -5}), "no number is from -5 to -5 without these"),
    (_schema(_nested(60)), "nested more than 48 deep"),
    (_schema({"anyOf": [{"type": "string"}] * 5000}), "more than 4000 parts"),
    *(
        (Grammar(GrammarKind.REGEX, pattern), text)
        for pattern, text in (
            ("a|", "an alternative is empty"),
            ("(|a)", "an alternative is empty"),
            ("a||b", "an alternative is empty"),
            ("*a", "nothing that '\\*' repeats"),
            ("(+)", "nothing that '\\+' repeats"),
            ("a**", "two repetitions"),
            ("a{3,1}", "wrong way round"),
            ("a{,3}", "expected .3}"),
            ("{", "nothing that '{' repeats"),
            ("a{1000001}", "too many"),
            ("((a{50}){50}){50}", "20000 within each other"),
            ("(a", "a group is not closed"),
            ("a)", "closes no group"),
            ("[a", "a class is not closed"),
            ("[]", "has to have letters"),
            ("[z-a]", "no order"),
            ("[a-\\d]", "no order"),
            ("[\n]", "write the end of a line"),
            ("a\\", "nothing behind the last"),
            ("(a)\\1", "references back"),
            ("\\k<a>", "cannot be imposed"),
            ("\\p{L}", "cannot be imposed"),
            ("\\bword\\b", "cannot be imposed"),
            ("(?=a)", "looking ahead"),
            ("(?<!a)", "looking behind"),
            ("(?i)a", "flags cannot be imposed"),
            ("(?P<n>a)", "flags cannot be imposed"),
            ("\\u12", "needs its digits"),
            ("\\u{110000}", "is no letter"),
            ("a^b", "can only stand at an end"),
            ("^*", "cannot be repeated"),
            ("(" * 200 + ")" * 200, "groups within each other"),
        )
    ),
    *(
        (Grammar(GrammarKind.EBNF, grammar), text)
        for grammar, text in (
            ("", "no rule is called root"),
            ('x ::= "a"', "no rule is called root"),
            ("root ::= a", "line 1: no rule is called 'a'"),
            ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is there twice"),
            ('root ::= "a', "expected .texts"),
            ("root ::= 'a'", "expected .texts"),
            ('root = "a"', "expected"),
            ('root ::= "a" |', "an alternative is empty"),
            ('root ::= ("a"', "a group is not closed"),
            ('root ::= "a"*?', "two repetitions"),
            ('root ::= "a"{3,2}', "wrong way round"),
            ('root ::= "a"{9999999}', "too many"),
            ("root ::= [z-a]", "the range z-a has no order"),
            ("root ::= .", "expected"),
            ('root ::= "\\q"', "expected"),
            ('root ::= TagDispatch(("a", b))\nb ::= "x"', "expected .texts"),
            ("root ::= root", "'root' needs itself"),
            ('root ::= "a" root', "'root' needs itself"),
            ('root ::= "x"\na ::= b\nb ::= a', "needs itself"),
        )
    ),
    (Grammar(GrammarKind.STRUCTURAL_TAG, "x"), "no JSON"),
    (Grammar(GrammarKind.STRUCTURAL_TAG, "{}"), "expected .*format"),
    (_tag({}), r"at \$.format: expected an object whose type is one of"),
    (_tag({"type": "sequence", "elements": []}), "a list that is not empty"),
    (_tag({"type": "json_schema"}), "json_schema is missing"),
    (_tag({"type": "json_schema", "json_schema": {"type": "foo"}}), r"at \$.format.json_schema.type: expected one of"),
    (_tag({"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": ""}), "needs an end"),
    (
        _tag(
            {
                "type": "triggered_tags",
                "triggers": ["b"],
                "tags": [{"begin": "a", "content": {"type": "regex", "pattern": "a"}, "end": ""}],
            }
        ),
        "it does with 0|got 0",
    ),
    (
        _tag({"type": "or", "elements": [{"type": "regex", "pattern": "a"}, {"type": "any_text"}]}),
        "cannot stand beside",
    ),
    (_tag({"type": "regex", "pattern": "("}), r"at \$.format.pattern"),
    (_tag({"type": "grammar", "grammar": "root ::= a"}), "no rule is called 'a'"),
)


@pytest.mark.parametrize(("grammar", "text"), _BAD, ids=lambda value: getattr(value, "text", "")[:40] or "said")
def test_what_cannot_be_imposed_is_refused_with_its_place(grammar: Grammar, text: str) -> None:
    """And the way out, where there is one."""
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
_RULES = st.lists(
    st.sampled_from(
        [
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
            '""',
            " ",
        ]
    ),
    max_size=14,
).map(lambda parts: "root ::= " + "".join(parts))
_ENGINE = settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _compile_if_checked(engine: GrammarEngine, grammar: Grammar) -> None:
    try:
        check_grammar(grammar)
    except GrammarRefused:
        return
    assert engine.make(grammar, tokens=2)[0] == "", grammar.text
    if (line := on_one_line(grammar)) != grammar:
        check_grammar(line)
        assert engine.make(line, tokens=2)[0] == "", line.text


@_ENGINE
@given(schema=_SCHEMAS)
def test_any_schema_that_passes_is_compiled(engine: GrammarEngine, schema: Any) -> None:
    """One that does not would end everybody's texts for a while."""
    _compile_if_checked(engine, _schema(schema))


@_ENGINE
@given(pattern=_PATTERNS)
def test_any_pattern_that_passes_is_compiled(engine: GrammarEngine, pattern: str) -> None:
    """As above."""
    _compile_if_checked(engine, Grammar(GrammarKind.REGEX, pattern))


@_ENGINE
@given(rules=_RULES)
def test_any_grammar_of_rules_that_passes_is_compiled(engine: GrammarEngine, rules: str) -> None:
    """As above."""
    _compile_if_checked(engine, Grammar(GrammarKind.EBNF, rules))


@settings(max_examples=examples(200), deadline=None)
@given(
    text=st.text(max_size=30),
    kind=st.sampled_from([kind for kind in GrammarKind if kind is not GrammarKind.JSON_OBJECT]),
)
def test_any_text_is_a_grammar_or_refused(text: str, kind: GrammarKind) -> None:
    """And no other error."""
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
    calls: list[CallDelta] = [call for delta in deltas for call in delta.calls]
    names = [call.name for call in calls if call.name]
    found = [
        (name, "".join(call.arguments for call in calls if call.index == index)) for index, name in enumerate(names)
    ]
    return "".join(delta.text + delta.reasoning for delta in deltas), found


@pytest.mark.parametrize("name", [name for name in TOOL_PARSERS if name != "auto"])
def test_a_forced_call_is_made_and_read(engine: GrammarEngine, name: str) -> None:
    """Of the function that was named, with arguments that fit, in the form that its parser reads."""
    asked = Conversation((), _TOOLS, tool_choice="function", tool_name="measure")
    imposed = impose_calls(asked, name)
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


def test_one_of_all_functions_is_called_where_a_call_is_required(engine: GrammarEngine) -> None:
    """Whichever the model likes."""
    imposed = impose_calls(Conversation((), _TOOLS, tool_choice="required"), "hermes3")
    assert imposed is not None
    made = {_called("hermes3", engine.make(imposed.grammar, tokens=80, seed=seed)[1])[1][0][0] for seed in range(20)}
    assert made <= {"measure", "rest"}


def test_content_stays_free_where_calls_are_only_guided(engine: GrammarEngine) -> None:
    """Of tools that are strict, or of all where the model is set so."""
    asked = Conversation((), _TOOLS)
    assert impose_calls(asked, "hermes3") is None
    assert impose_calls(Conversation((), ()), "hermes3", guided=True) is None
    assert impose_calls(Conversation((), _TOOLS, tool_choice="none"), "hermes3", guided=True) is None
    imposed = impose_calls(asked, "hermes3", guided=True)
    assert imposed is not None
    assert not imposed.forced
    assert engine.make(imposed.grammar, tokens=20)[0] == ""
    assert impose_calls(asked, "lfm2", guided=True) is None
    strict = {"type": "function", "function": {**_TOOLS[0]["function"], "strict": True}}  # type: ignore[dict-item]
    some = impose_calls(Conversation((), (strict, _TOOLS[1])), "hermes3")
    assert some is not None
    one, other = json.loads(some.grammar.text)["format"]["tags"]
    assert one["content"] == {"type": "grammar", "grammar": one_line_rules(_FLAGS)}
    assert other["content"]["grammar"] == one_line_rules({"type": "object", "additionalProperties": True})


def test_a_tool_whose_schema_cannot_be_imposed_is_named() -> None:
    """By its place among the tools."""
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "int"}}}}}
    asked = Conversation((), (_TOOLS[0], bad), tool_choice="function", tool_name="bad")
    with pytest.raises(GrammarRefused, match=r"at \$.properties.a.type: expected one of") as refused:
        impose_calls(asked, "generic")
    assert refused.value.field == "tools[1].function.parameters"


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"$ref": "#/$defs/a", "$defs": {"a": _FLAGS}}])
def test_arguments_of_a_function_that_says_little_are_any_object(engine: GrammarEngine, schema: Any) -> None:
    """And never an empty one because nothing was said."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    imposed = impose_calls(Conversation((), (tool,), tool_choice="required"), "devstral")
    assert imposed is not None
    error, text = engine.make(imposed.grammar, tokens=30)
    assert error == ""
    assert text.startswith("[TOOL_CALLS]f[ARGS]{")
