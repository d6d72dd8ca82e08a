"""Sequences held to grammars: what comes out matches, ends, and does not depend on neighbours.

A vocabulary of single bytes and a few longer tokens stands for a model's; a random choice among the
allowed tokens stands for the model. Cases of the public reports by number.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from kernels.batch import Constraint, Sampling, SlotOpen, StepInput, TokenLogprobs
from kernels.constrain import (
    GRAMMARS,
    RENEWAL_LEN,
    RENEWED_MAX,
    BadGrammar,
    Constrainer,
    EngineUnavailable,
    TokenTable,
    load_engine,
)
from kernels.grammar.llguidance import FORCED_BYTES, LIMITS
from kernels.load.base import BadConfig
from tests.kernels.conftest import Answered
from tests.kernels.driver import ints, load

EOS, CONTROL = 0, 1
WORDS = [b"", b"<ctl>", b'{"', b'":', b" true", b"null", b"  ", b"<think>", b"</think>", b"left"]
PIECES = [*WORDS, *(bytes([byte]) for byte in range(256))]
V = len(PIECES) + 30  # columns of padding
WORD = "abcdefghijklmnopqrst"
OBJ = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "boolean"},
                "c": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["v", "c"],
            "additionalProperties": False,
        }
    },
}


def table() -> TokenTable:
    return TokenTable(PIECES, frozenset({EOS, CONTROL}), (EOS,), V)


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def constrainer(request: pytest.FixtureRequest) -> Constrainer:
    try:
        return Constrainer(load_engine(request.param, table()), table())
    except EngineUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def default() -> Constrainer:
    return Constrainer(load_engine("auto", table()), table())


def schema(value: Any, **rest: str) -> Constraint:
    return Constraint("json_schema", json.dumps(value), **rest)


def allowed_of(constrainer: Constrainer, slot: int) -> list[int] | None:
    masks = constrainer.masks(ints([slot]))
    if masks is None:
        return None
    assert not len(masks.broken)
    allowed = masks.allowed(V)
    assert allowed.shape == (1, V)
    return np.flatnonzero(allowed[0]).tolist()


def choose(rng: random.Random, allowed: list[int]) -> int:
    """An end more often than not, so that strings do not go on for ever. No control characters,
    where there is a choice: of xgrammar's strings of bounded length they would be part."""
    ends = [token for token in allowed if token == EOS or PIECES[token] in b'"}],']
    shown = [token for token in allowed if not PIECES[token] or min(PIECES[token]) >= 32]
    return rng.choice(ends if ends and rng.random() < 0.5 else shown or allowed)


def say(constrainer: Constrainer, slot: int, rng: random.Random, count_max: int = 400) -> list[int]:
    """Tokens until the end, chosen at random."""
    tokens: list[int] = []
    while not tokens or tokens[-1] != EOS:
        assert len(tokens) < count_max, bytes_of(tokens)
        allowed = allowed_of(constrainer, slot)
        assert allowed, "there is always a way on"
        assert CONTROL not in allowed and max(allowed) < len(PIECES)
        token = choose(rng, allowed)
        constrainer.take(ints([slot]), ints([token]))
        tokens.append(token)
    return tokens


def bytes_of(tokens: list[int]) -> bytes:
    return b"".join(PIECES[token] for token in tokens)


def text_of(constrainer: Constrainer, constraint: Constraint, seed: int) -> str:
    constrainer.clear()
    constrainer.open(0, constraint, [])
    tokens = say(constrainer, 0, random.Random(seed))
    constrainer.close(0)
    return bytes_of(tokens).decode()


def test_every_answer_fits_its_schema(constrainer: Constrainer) -> None:
    for seed in range(20):
        value = json.loads(text_of(constrainer, schema(OBJ), seed))
        assert set(value) == {"a", "b"} and type(value["a"]) is int
        tree = json.loads(text_of(constrainer, schema(TREE), seed))
        assert set(tree) == {"v", "c"}


def test_expressions_choices_and_grammars(constrainer: Constrainer) -> None:
    """B103: what has come to its end takes the end of the sequence, and nothing else."""
    choice = Constraint("choice", json.dumps(["left", "right", 'qu"ote']))
    ebnf = Constraint("ebnf", 'root ::= "a" [0-9]+ ("-" root)?')
    for seed in range(30):
        assert text_of(constrainer, choice, seed) in ("left", "right", 'qu"ote')
        assert re.fullmatch("[a-f]{6}", text_of(constrainer, Constraint("regex", "[a-f]{6}"), seed))
        assert re.fullmatch("a[0-9]+(-a[0-9]+)*", text_of(constrainer, ebnf, seed))


ODD = [
    "",
    "a",
    "ab",
    "a.b",
    "a|b",
    "(a",
    "[x]",
    "{2}",
    "\\d",
    "^a$",
    "a-b&c~#",
    "\n\t",
    '"é"',
    "\U0001f600",
]


@pytest.mark.parametrize("seed", range(12))
def test_an_option_is_said_as_it_stands(constrainer: Constrainer, seed: int) -> None:
    """Also one that begins another, or is none of an expression's characters."""
    options = random.Random(seed).sample(ODD[1:], 5)
    seen = {
        text_of(constrainer, Constraint("choice", json.dumps(options)), nth) for nth in range(40)
    }
    assert seen <= set(options) and len(seen) > 1


def test_there_may_be_thousands_of_options(default: Constrainer) -> None:
    options = [f"room {n * 7919 % 10_007} of {n}" for n in range(5000)]
    for seed in range(3):
        assert text_of(default, Constraint("choice", json.dumps(options)), seed) in options


@pytest.mark.parametrize(
    "expression",
    [
        r"\d{4}-\d\d",
        r"[\d.-]{3}\w",
        r"[^\w\s]\\d\W",
        r"\S\s[x\D]",
        r"[\d-]{2}",
        r"(?:\w+ ){2}\.",
    ],
)
@pytest.mark.parametrize("kind", ["regex", "ebnf"])
def test_classes_are_of_ascii(default: Constrainer, expression: str, kind: str) -> None:
    """A model that begins an emoji was led to a digit of another script."""
    lark = f'start: "a/\\\\d" T // /\\d/\nT: /{expression}/'
    expected = expression if kind == "regex" else re.escape("a/\\d") + expression
    for seed in range(12):
        said = text_of(default, Constraint(kind, expression if kind == "regex" else lark), seed)
        assert re.fullmatch(expected, said, re.ASCII | re.DOTALL), said


def test_the_default_engine_takes_lark_as_well(default: Constrainer) -> None:
    lark = Constraint("ebnf", 'start: "x" WORD\nWORD: /[a-z]{1,4}/')
    for seed in range(9):
        assert re.fullmatch("x[a-z]{1,4}", text_of(default, lark, seed))


TAGS = [
    {
        "trigger": "<f=",
        "begin": "<f=a>",
        "schema": {"type": "integer", "minimum": 5, "maximum": 7},
        "end": "</f>",
    },
    {"trigger": "<f=", "begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    {"trigger": "[", "begin": "[", "schema": True, "end": ""},
]


def test_text_is_free_until_a_trigger_and_behind_its_end(constrainer: Constrainer) -> None:
    constrainer.clear()
    constrainer.open(0, Constraint("structural_tag", json.dumps(TAGS)), [])

    def says(text: str) -> bool:
        for byte in text.encode():
            token = PIECES.index(bytes([byte]))
            if token not in (allowed_of(constrainer, 0) or ()):
                return False
            constrainer.take(ints([0]), ints([token]))
        return True

    assert EOS in (allowed_of(constrainer, 0) or ())
    assert says('Well: {"a"} <f and <f=a>6</f>, <f=b>true</f>; [null <f')
    assert EOS in (allowed_of(constrainer, 0) or ())
    assert says("=") and not says("c") and says("a>") and not says("8")
    assert EOS not in (allowed_of(constrainer, 0) or ())
    assert says("5</f> é")


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize(
    ("text", "cut"),
    [("name!", [b"na", b"me", b"!"]), ("<ctl> name!", [*b"<ctl> ", b"na", b"me", b"!"])],
)
def test_forced_text_is_spelled_as_the_tokenizer_does_it(
    blank: str, text: str, cut: list[bytes | int]
) -> None:
    """Also by one that puts a blank before each text. What it takes for a special token is spelled
    by other pieces."""
    pieces = [*PIECES, b"na", b"me", b"name"]
    ids = {piece: token for token, piece in reversed(list(enumerate(pieces)))}

    def encode(text: str) -> list[int]:
        return [ids[word.encode()] for word in re.findall("na|me|<ctl>|.", blank + text)]

    known = TokenTable(pieces, frozenset({EOS, CONTROL}), (EOS,), len(pieces), encode)
    held = Constrainer(load_engine("auto", known), known)
    held.open(0, Constraint("regex", f"[0-9]{text}"), [])
    held.take(ints([0]), ints([ids[b"7"]]))
    said: list[bytes] = []
    while (masks := held.masks(ints([0]))) is not None:
        allowed = np.flatnonzero(masks.allowed(len(pieces))[0]).tolist()
        assert len(allowed) == 1, [pieces[token] for token in allowed]
        held.take(ints([0]), ints(allowed))
        said += [pieces[token] for token in allowed if token != EOS]
    assert said == [bytes([part]) if isinstance(part, int) else part for part in cut]


def test_a_long_text_that_is_forced_is_cut_as_a_whole_and_in_little_work() -> None:
    """Each mask and each forced token asks how all that follows is cut, of which one is taken."""
    pieces = [*PIECES, b"na", b"me", "日".encode(), "日日".encode()]
    ids = {piece: token for token, piece in reversed(list(enumerate(pieces)))}
    lens: list[int] = []

    def encode(text: str) -> list[int]:
        lens.append(len(text.encode()))
        return [ids[word.encode()] for word in re.findall("na|me|日日|日|.", text)]

    text = "".join(random.Random(1).choices(["name", "日日日", "x", "na日"], k=1000))
    known = TokenTable(pieces, frozenset({EOS, CONTROL}), (EOS,), len(pieces), encode)
    held = Constrainer(load_engine("llguidance", known), known)
    held.open(0, Constraint("regex", f"[0-9]{text}"), [])
    held.take(ints([0]), ints([ids[b"7"]]))
    lens.clear()
    jumped: list[int] = []
    while True:
        masks = held.masks(ints([0]))
        assert masks is not None
        (token,) = np.flatnonzero(masks.allowed(len(pieces))[0]).tolist()
        held.take(ints([0]), ints([token]))
        if token == EOS:
            break
        jumped += [token, *held.jump(ints([0]), ints([40]))[1].tolist()]
    assert b"".join(pieces[token] for token in jumped) == text.encode()
    assert jumped == encode(text)
    assert max(lens[:-1]) <= FORCED_BYTES


LONG = {"type": "object", "properties": {"left_key": OBJ, "null_or": {"enum": ["nullify", "null"]}}}
FORCING = [
    schema({**LONG, "required": ["left_key", "null_or"], "additionalProperties": False}),
    schema({"const": {"left": [None, True]}}, begin="<think>", end="</think>"),
    Constraint("regex", "left(right|rigging){3}nullify"),
    Constraint("choice", '["left and right", "left and null"]'),
    Constraint("structural_tag", json.dumps([{**TAGS[0], "begin": "<f=null>"}])),
]


@pytest.mark.parametrize("constraint", FORCING, ids=lambda c: f"{c.kind} {c.text}"[:40])
@pytest.mark.parametrize("room", [1, 3, 100])
def test_what_is_jumped_over_is_what_masks_would_have_left(
    default: Constrainer, constraint: Constraint, room: int
) -> None:
    """And it needs no more than the tokens before to come again."""
    default.clear()
    for seed in range(6):
        default.open(0, constraint, [])
        rng = random.Random(seed)
        tokens: list[int] = []
        only: list[bool] = []  # whether nothing else could come
        while not tokens or tokens[-1] != EOS:
            allowed = allowed_of(default, 0)
            tokens.append(choose(rng, allowed or [PIECES.index(b"x"), 8]))
            only.append(allowed is not None and len(allowed) == 1)
            default.take(ints([0]), ints(tokens[-1:]))
        jumped_count = at = 0
        default.open(1, constraint, [])
        while at < len(tokens):
            allowed = allowed_of(default, 1)
            assert allowed is None or tokens[at] in allowed
            default.take(ints([1]), ints([tokens[at]]))
            slots, jumped = default.jump(ints([7, 1]), ints([9, room]))
            assert slots.tolist() == [1] * len(jumped) and len(jumped) <= room
            assert jumped.tolist() == tokens[at + 1 :][: len(jumped)]
            assert all(only[at + 1 :][: len(jumped)])
            at += 1 + len(jumped)
            jumped_count += len(jumped)
            if len(jumped):
                default.open(2, constraint, tokens[: at - len(jumped) // 2])
                assert allowed_of(default, 2) == (
                    allowed_of(default, 1) if len(jumped) < 2 else [tokens[at - len(jumped) // 2]]
                )
                default.close(2)
        assert jumped_count or constraint.kind == "structural_tag"
        default.close(0)
        default.close(1)


def test_an_ended_row_is_free(constrainer: Constrainer) -> None:
    constrainer.clear()
    constrainer.open(0, Constraint("choice", '["left"]'), [])
    constrainer.take(ints([0]), ints([PIECES.index(b"left")]))
    assert allowed_of(constrainer, 0) == [EOS]
    constrainer.take(ints([0]), ints([EOS]))
    assert constrainer.masks(ints([0])) is None
    constrainer.take(ints([0]), ints([50]))  # the row of a step that was sent too early
    assert constrainer.masks(ints([0])) is None


def test_blanks_between_tokens_of_json_are_bounded(constrainer: Constrainer) -> None:
    """B101."""
    constrainer.clear()
    constrainer.open(0, schema(OBJ), [])
    tokens: list[int] = []
    blank = PIECES.index(b" ")
    for _ in range(400):
        allowed = allowed_of(constrainer, 0)
        assert allowed
        inside = tokens and bytes_of(tokens).count(b'"') % 2
        token = blank if blank in allowed and not inside else random.Random(1).choice(allowed)
        ends = [token for token in allowed if token == EOS or PIECES[token] in b'",:}']
        token = token if token == blank else (ends or [token])[0]
        constrainer.take(ints([0]), ints([token]))
        if token == EOS:
            break
        tokens.append(token)
    runs = re.findall(rb" +", re.sub(rb'"[^"]*"', b"", bytes_of(tokens)))
    assert runs and max(map(len, runs)) <= 16
    assert json.loads(bytes_of(tokens))


def test_two_slots_of_one_grammar_keep_their_own_place(constrainer: Constrainer) -> None:
    """B105."""
    constrainer.clear()
    for slot in range(4):
        constrainer.open(slot, schema(OBJ), [])
    texts: dict[int, list[int]] = {slot: [] for slot in range(4)}
    rng = random.Random(5)
    running = list(texts)
    while running:
        masks = constrainer.masks(ints(running))
        assert masks is not None and masks.rows.tolist() == list(range(len(running)))
        allowed = masks.allowed(V)
        tokens = []
        for row in range(len(running)):
            options = np.flatnonzero(allowed[row]).tolist()
            tokens.append(choose(rng, options))
        constrainer.take(ints(running), ints(tokens))
        for slot, token in zip(running, tokens, strict=True):
            texts[slot].append(token)
        running = [slot for slot in running if texts[slot][-1] != EOS]
    for tokens in texts.values():
        assert set(json.loads(bytes_of(tokens))) == {"a", "b"}
    assert len({bytes_of(tokens) for tokens in texts.values()}) > 1


def test_replaying_what_was_generated_leads_to_the_same_place(constrainer: Constrainer) -> None:
    for constraint in (schema(OBJ), schema(OBJ, begin="<think>", end="</think>")):
        constrainer.clear()
        constrainer.open(0, constraint, [])
        tokens: list[int] = []
        rng = random.Random(3)
        for _ in range(25):
            constrainer.open(1, constraint, tokens)
            here, there = allowed_of(constrainer, 0), allowed_of(constrainer, 1)
            assert here == there
            constrainer.close(1)
            token = rng.choice(here) if here else rng.choice([PIECES.index(b"x"), 8])
            constrainer.take(ints([0]), ints([token]))
            tokens.append(token)
            if token == EOS:
                break


def test_reasoning_is_free_and_what_follows_is_not(constrainer: Constrainer) -> None:
    begin, end = PIECES.index(b"<think>"), PIECES.index(b"</think>")
    constrainer.clear()
    constrainer.open(0, schema(OBJ, begin="<think>", end="</think>"), [])
    allowed = allowed_of(constrainer, 0)
    assert allowed is not None and begin in allowed and PIECES.index(b'{"') in allowed
    constrainer.take(ints([0]), ints([begin]))
    assert constrainer.masks(ints([0])) is None
    for token in (PIECES.index(b"a"), *(PIECES.index(bytes([b])) for b in b"</think")):
        constrainer.take(ints([0]), ints([token]))
        assert constrainer.masks(ints([0])) is None
    constrainer.take(ints([0]), ints([PIECES.index(b">")]))
    assert json.loads(bytes_of(say(constrainer, 0, random.Random(1))))

    constrainer.open(1, schema(OBJ, begin="<think>", end="</think>"), [])
    constrainer.take(ints([1]), ints([PIECES.index(b'{"')]))
    assert allowed_of(constrainer, 1)
    constrainer.open(2, schema(OBJ, end="</think>"), [])
    assert constrainer.masks(ints([2])) is None
    constrainer.take(ints([2]), ints([end]))
    assert allowed_of(constrainer, 2)


BAD = [
    *[
        schema(value)
        for value in (
            {"type": "objekt"},
            {"type": 7},
            "not a schema",
            None,
            {"properties": []},
            {"items": "x", "type": "array"},
            {"type": "string", "pattern": "("},
            {"$ref": "#"},
            {
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                "$ref": "#/$defs/a",
            },
            {"$ref": "#/nope"},
            {"$ref": "http://127.0.0.1:9/s.json"},
            {"type": "integer", "minimum": 3, "exclusiveMaximum": 3},
            {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
            {"type": "integer", "exclusiveMinimum": -1e308, "exclusiveMaximum": -(2**63)},
            {"enum": [2**53 + 1]},
            False,
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
        )
    ],
    Constraint("json_schema", "{"),
    Constraint("json_schema", '{"maximum": 1e400}'),
    Constraint("regex", "("),
    Constraint("ebnf", "root ::= nothing"),
    Constraint("ebnf", 'root ::= "a'),
    Constraint("ebnf", "start: missing"),
    Constraint("ebnf", ""),
    Constraint("structural_tag", json.dumps([{**TAGS[0], "schema": {"type": "objekt"}}])),
    Constraint("structural_tag", json.dumps([{**TAGS[0], "schema": False}])),
    Constraint("nonsense", ""),
]


@pytest.mark.parametrize("constraint", BAD, ids=lambda c: f"{c.kind} {c.text}"[:60])
def test_wrong_constraints_are_refused_in_words(
    default: Constrainer, constraint: Constraint
) -> None:
    """B095, B097, B107."""
    with pytest.raises(BadGrammar) as caught:
        default.prepare(constraint)
    text = str(caught.value)
    assert 0 < len(text) < 400 and "\n" not in text and "/root" not in text


def test_large_schemas_are_compiled_or_refused_in_bounded_work(constrainer: Constrainer) -> None:
    """B099. No time is asserted: the test's own time limit holds it."""

    def nested(depth: int) -> Any:
        if not depth:
            return {"type": "integer"}
        branches = [
            {"type": "object", "properties": {f"k{i}": nested(depth - 1)}, "required": [f"k{i}"]}
            for i in range(4)
        ]
        return {"oneOf": branches}

    wide = {f"p{i}": {"type": "string"} for i in range(2000)}
    for value in (
        nested(5),
        {"type": "object", "properties": wide},
        {"type": "array", "maxItems": 100_000, "items": OBJ},
        {"type": "string", "pattern": "(a+)+(b|c)*$", "maxLength": 5000},
    ):
        try:
            constrainer.prepare(schema(value))
        except BadGrammar:
            continue


class Fickle:
    """A matcher that breaks at its third mask."""

    is_worn = False

    def __init__(self) -> None:
        self.is_broken = False
        self.masks = 0

    def take(self, token: int) -> bool:
        return True


class FickleEngine:
    is_worn = False

    def compile(self, kind: str, text: str, *, alone: bool = False) -> Any:
        return self

    def new(self) -> Fickle:
        return Fickle()

    def fill(self, matchers: list[tuple[Any, int]], mask: Any) -> None:
        for matcher, index in matchers:
            matcher.masks += 1
            matcher.is_broken = matcher.masks == 3
            mask[index] = -1

    def replay(self, matcher: Any, token: Any) -> None:
        raise AssertionError("nothing was generated")


def test_a_matcher_that_breaks_fails_its_row_alone() -> None:
    fickle = Constrainer(FickleEngine(), table())
    fickle.open(4, Constraint("regex", "x"), [])
    fickle.masks(ints([4]))
    fickle.open(5, Constraint("regex", "x"), [])
    fickle.masks(ints([5, 4]))
    masks = fickle.masks(ints([5, 9, 4]))
    assert masks is not None
    assert masks.rows.tolist() == [0] and masks.broken.tolist() == [2] and fickle.broken == {4}
    fickle.close(4)
    assert not fickle.broken


class SharedRoot:
    """Its matchers make states together; more than 100 of them break all."""

    def __init__(self) -> None:
        self.states: set[tuple[int, ...]] = set()

    @property
    def is_worn(self) -> bool:
        return len(self.states) > 100

    def new(self) -> Any:
        return SharedMatcher(self)


class SharedMatcher:
    """It is known to be broken once it is used."""

    def __init__(self, root: SharedRoot) -> None:
        self.root = root
        self.taken: list[int] = []
        self.is_broken = False

    def take(self, token: int) -> bool:
        self.taken.append(token)
        if token > 1:
            self.root.states |= {(*self.taken, n) for n in range(max(1, token - 150))}
        self.is_broken = self.root.is_worn
        return not self.is_broken


class SharedEngine:
    """The mask of a matcher is the sum of what it has taken. Token 1 makes no state, 2 to 150 one
    for each text, 255 too many for any."""

    def __init__(self) -> None:
        self.compiled = 0

    def compile(self, kind: str, text: str, *, alone: bool = False) -> Any:
        self.compiled += 1
        return SharedRoot()

    def fill(self, matchers: list[tuple[Any, int]], mask: Any) -> None:
        for matcher, index in matchers:
            assert not matcher.is_broken
            matcher.is_broken = matcher.root.is_worn
            mask[index] = sum(matcher.taken)

    def replay(self, matcher: Any, token: int) -> None:
        matcher.take(token)


def test_rows_go_on_where_what_they_share_is_spent() -> None:
    engine = SharedEngine()
    shared = Constrainer(engine, table())
    for wave in range(40):
        sums = dict.fromkeys(range(4), 0)
        for slot in sums:
            shared.open(slot, Constraint("regex", "x"), [])
        for step in range(6):  # 24 new states in each wave
            sums = {slot: value + wave + step + 1 for slot, value in sums.items()}
            shared.take(ints(list(sums)), ints([wave + step + 1] * 4))
            sums[wave % 4] += 70
            shared.take(ints([wave % 4]), ints([70]))
            masks = shared.masks(ints(list(sums)))
            assert masks is not None and not len(masks.broken)
            assert masks.words[:, 0].tolist() == list(sums.values())
        for slot in sums:
            shared.close(slot)
    assert 4 < engine.compiled < 12


def test_a_long_row_outlives_any_number_of_roots() -> None:
    """Its neighbours spend what they share again and again, and leave."""
    engine = SharedEngine()
    shared = Constrainer(engine, table())
    rule = Constraint("regex", "x")
    shared.open(0, rule, [7])
    length = 7
    for _ in range(40):
        shared.take(ints([0] * RENEWAL_LEN), ints([1] * RENEWAL_LEN))
        for slot, token in ((1, 201), (2, 202)):
            shared.open(slot, rule, [])
            shared.take(ints([slot]), ints([token]))
        length += RENEWAL_LEN
        masks = shared.masks(ints(range(3)))
        assert masks is not None and not len(masks.broken)
        assert masks.words[:, 0].tolist() == [length, 201, 202]
        shared.close(1)
        shared.close(2)
    assert engine.compiled > 40


@pytest.mark.parametrize("guilty", [[3], [0, 3, 7], [0, 1, 2, 3, 4, 5, 6]])
def test_whose_text_is_too_much_fails_and_nobody_else(guilty: list[int]) -> None:
    """However many they are, a row is made good twice at most."""
    engine = SharedEngine()
    shared = Constrainer(engine, table())
    for slot in range(8):
        shared.open(slot, Constraint("regex", "x"), [1])
    shared.take(ints(range(8)), ints([255 if slot in guilty else 1 for slot in range(8)]))
    for _ in range(3):
        masks = shared.masks(ints(range(8)))
        assert masks is not None and masks.broken.tolist() == guilty
        assert shared.broken == set(guilty)
        assert set(masks.words[:, 0].tolist()) == {2}
    assert engine.compiled <= 1 + 2 * 8
    for slot in guilty:
        shared.close(slot)
    assert not shared.broken
    shared.open(0 if 0 in guilty else 9, Constraint("regex", "x"), [5])
    masks = shared.masks(ints([0 if 0 in guilty else 9]))
    assert masks is not None and masks.words[:, 0].tolist() == [5]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("states", [300, 60])
def test_an_automaton_that_is_spent_is_made_again(
    monkeypatch: pytest.MonkeyPatch, states: int, seed: int
) -> None:
    """The states of an expression are shared by all who follow it: what ends their number must
    change nothing that any of them may say; nor what ends it for the text of one alone."""
    rule = Constraint("regex", "([ab]*a[ab]{6}|c([a-z]{1,4} ){30})!")
    apart = [Constrainer(load_engine("llguidance", table()), table()) for _ in range(6)]
    monkeypatch.setitem(LIMITS, "max_lexer_states", states)
    together = Constrainer(load_engine("llguidance", table()), table())
    made: list[tuple[str, str]] = []
    compile_one = together.engine.compile

    def compiled(kind: str, text: str, *, alone: bool = False) -> Any:
        made.append((kind, text))
        return compile_one(kind, text, alone=alone)

    monkeypatch.setattr(together.engine, "compile", compiled)
    rng = random.Random(seed)
    for slot, alone in enumerate(apart):
        together.open(slot, rule, [])
        alone.open(0, rule, [])
    running = list(range(6))
    for _ in range(60):
        masks = together.masks(ints(running))
        assert masks is not None and not len(masks.broken)
        tokens = []
        for row, slot in enumerate(running):
            allowed = np.flatnonzero(masks.allowed(V)[row]).tolist()
            assert allowed == allowed_of(apart[slot], 0)
            tokens.append(rng.choice([t for t in allowed if PIECES[t] != b"!"] or allowed))
            apart[slot].take(ints([0]), ints(tokens[-1:]))
        together.take(ints(running), ints(tokens))
        running = [s for s, t in zip(running, tokens, strict=True) if t != EOS]
        if not running:
            break
    assert len(made) > 1 and set(made) == {("regex", rule.text)}


@pytest.mark.parametrize("form", ["{}", "({})?"])
def test_what_breaks_one_row_of_an_expression_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """One way through it costs more than a mask may, the other next to nothing. Also where the text
    may be empty: the library takes its end from a broken matcher as well."""
    rule = Constraint("regex", form.format("x( ?[a-z]{1,9}){400}|y[0-9]+"))
    monkeypatch.setitem(LIMITS, "step_lexer_fuel", 300)
    held = Constrainer(load_engine("llguidance", table()), table())
    for slot, first in enumerate("yxyy"):
        held.open(slot, rule, [])
        held.masks(ints([slot]))
        held.take(ints([slot]), ints([PIECES.index(first.encode())]))
    digits = [PIECES.index(b"%d" % digit) for digit in range(10)]
    letters = [PIECES.index(letter.encode()) for letter in "abcd efgh"]
    rng = random.Random(1)
    for _ in range(40):
        masks = held.masks(ints(range(4)))
        assert masks is not None
        for row in np.flatnonzero(masks.rows != 1).tolist():
            assert set(np.flatnonzero(masks.allowed(V)[row]).tolist()) <= {EOS, *digits}
        held.take(
            ints(range(4)), ints([rng.choice(letters if s == 1 else digits) for s in range(4)])
        )
    assert held.broken == {1} and masks.rows.tolist() == [0, 2, 3]


def test_few_are_made_good_in_one_step() -> None:
    """Others wait for it: of sixty whose text is too much most fail at once."""
    engine = SharedEngine()
    shared = Constrainer(engine, table())
    for slot in range(60):
        shared.open(slot, Constraint("regex", "x"), [])
    shared.take(ints(range(60)), ints([255] * 60))
    masks = shared.masks(ints(range(60)))
    assert masks is not None and len(masks.broken) == 60
    assert engine.compiled == 1 + RENEWED_MAX


def test_whoever_watches_sees_that_grammars_are_followed() -> None:
    """A worker in which nothing is counted for a while is taken for one that hangs."""
    shared = Constrainer(SharedEngine(), table())
    seen = [shared.work]

    def rises_by(count: int) -> None:
        seen.append(shared.work)
        assert seen[-1] - seen[-2] >= count

    for slot in range(10):
        shared.open(slot, Constraint("regex", "x"), [1] * 5)
    rises_by(50)
    shared.masks(ints(range(10)))
    rises_by(3)
    shared.take(ints(range(10)), ints([1] * 10))
    rises_by(10)


class Hasty:
    """A matcher that says twice what is forced, and breaks as it takes the second."""

    is_worn = False

    def __init__(self) -> None:
        self.is_broken = False
        self.taken: list[int] = []

    def compile(self, kind: str, text: str, *, alone: bool = False) -> Any:
        return self

    def new(self) -> Any:
        return self

    def forced(self) -> int:
        return 40 + len(self.taken)

    def take(self, token: int) -> bool:
        self.is_broken = token == 41
        self.taken.append(token)
        return not self.is_broken

    def replay(self, matcher: Any, token: Any) -> None:
        raise AssertionError("nothing was generated")

    def fill(self, matchers: Any, mask: Any) -> None:
        assert not matchers


def test_what_breaks_its_matcher_was_not_forced() -> None:
    held = Constrainer(Hasty(), table())
    held.open(2, Constraint("regex", "x"), [])
    slots, tokens = held.jump(ints([2]), ints([5]))
    assert slots.tolist() == [2] and tokens.tolist() == [40]
    assert held.guides[2].taken == [40]
    masks = held.masks(ints([2]))
    assert masks is not None and masks.broken.tolist() == [0]


def test_what_was_generated_is_replayed_as_it_went(default: Constrainer) -> None:
    """llguidance has broken an expression that a resumed request had followed, where 40 tokens came
    without the masks that it works through from one to the next."""
    pieces = [*PIECES, *(f"{a}{b}{c}".encode() for a in WORD for b in WORD for c in WORD)]
    known = TokenTable(pieces, frozenset({EOS, CONTROL}), (EOS,), len(pieces))
    rule = Constraint("regex", "( ?[a-z]{1,9}){120}")
    first, second = (Constrainer(load_engine("llguidance", known), known) for _ in range(2))
    first.open(0, rule, [])
    rng = random.Random(2)
    tokens: list[int] = []
    for _ in range(60):
        masks = first.masks(ints([0]))
        assert masks is not None and not len(masks.broken)
        tokens.append(rng.choice(np.flatnonzero(masks.allowed(len(pieces))[0]).tolist()))
        first.take(ints([0]), ints(tokens[-1:]))
    broken = second.prepare(rule).new()
    for token in tokens:
        broken.take(token)
    assert broken.is_broken, "it can be replayed without masks: this tests nothing"
    third = Constrainer(load_engine("llguidance", known), known)
    third.open(0, rule, tokens)
    here, there = first.masks(ints([0])), third.masks(ints([0]))
    assert here is not None and there is not None and not len(there.broken)
    assert np.array_equal(here.words, there.words)


def test_the_seam_lists_its_engines() -> None:
    assert GRAMMARS.names() == ["auto", "llguidance", "xgrammar"]
    with pytest.raises(BadConfig, match="unknown grammar 'nope'"):
        load("nowhere", grammar="nope")


def answers(
    known: Answered, constraints: list[Constraint | None], sampling: Sampling, *, token_jump: bool
) -> tuple[list[list[int]], list[list[Any]], int]:
    """Tokens and log probabilities of one row for each constraint, and how many steps it took."""
    runner = load(known.path, token_jump=token_jump)
    vocab_size = runner.facts.vocab_size
    pieces = [*PIECES, *(f"<t{i}>".encode() for i in range(vocab_size))][:vocab_size]
    runner.use_vocabulary(TokenTable(pieces, frozenset({EOS, CONTROL}), (EOS,), vocab_size))
    prompt = ints(known.prompts[0])
    opened = [
        SlotOpen(slot, prompt, len(prompt), 0, ints(range(4 * slot, 4 * slot + 4)), sampling, rule)
        for slot, rule in enumerate(constraints)
    ]
    tokens: list[list[int]] = [[] for _ in constraints]
    logprobs: list[list[Any]] = [[] for _ in constraints]
    rows, slots, step_count = list(range(len(constraints))), runner.slots, 0
    counts = ints([len(prompt)] * len(rows))
    while rows:
        output = runner.execute(StepInput(ints(rows), counts, opened=opened))
        opened, step_count = [], step_count + 1
        for slot, token, entry in zip(
            output.slots, output.tokens, output.logprobs or [], strict=True
        ):
            tokens[slot].append(int(token))
            logprobs[slot].append(entry)
        for slot, token in zip(output.jumped_slots, output.jumped_tokens, strict=True):
            tokens[slot].append(int(token))
            logprobs[slot].append(TokenLogprobs(int(token), 0.0, ((int(token), 0.0),)))
        slots.check()
        rows = [row for row in rows if tokens[row][-1] != EOS and len(tokens[row]) < 40]
        counts = slots.known_len[rows] - slots.computed_len[rows]
    return tokens, logprobs, step_count


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, logprobs=3),
        Sampling(temperature=1.5, seed=4, top_k=30, logprobs=1),
        Sampling(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.3, logprobs=2),
        Sampling(temperature=0.7, logit_bias=((ord("r"), -90.0),), min_tokens=4, logprobs=1),
    ],
)
def test_a_runner_that_jumps_says_the_same_in_fewer_steps(
    tiny_models: dict[str, Answered], sampling: Sampling
) -> None:
    known = tiny_models["llama"]
    rules = [
        None,
        Constraint("regex", "left(right|rigging){3}"),
        Constraint("choice", '["left and right", "left and null"]'),
        schema({"const": {"left": [None, True]}}),
    ]
    plain = answers(known, rules, sampling, token_jump=False)
    jumping = answers(known, rules, sampling, token_jump=True)
    assert jumping[:2] == plain[:2]
    assert jumping[2] <= plain[2]
    for row in (1, 2):
        (tokens,), _, step_count = answers(known, [rules[row]], sampling, token_jump=True)
        assert tokens == plain[0][row] and step_count < len(tokens)


def test_a_runner_keeps_rows_to_their_grammars_beside_free_ones(
    tiny_models: dict[str, Answered],
) -> None:
    known = tiny_models["llama"]
    runner = load(known.path)
    vocab_size = runner.facts.vocab_size
    pieces = [*PIECES, *(f"<t{i}>".encode() for i in range(vocab_size))][:vocab_size]
    runner.use_vocabulary(TokenTable(pieces, frozenset({EOS, CONTROL}), (EOS,), vocab_size))

    def opening(slot: int, constraint: Constraint | None, sampling: Sampling) -> SlotOpen:
        prompt = ints(known.prompts[0])
        pages = ints(range(4 * slot, 4 * slot + 4))
        return SlotOpen(slot, prompt, len(prompt), 0, pages, sampling, constraint)

    greedy, hot = Sampling(temperature=0.0), Sampling(temperature=2.0, seed=4)
    opened = [
        opening(0, None, greedy),
        opening(1, Constraint("regex", "[a-f]{6}"), greedy),
        opening(2, Constraint("regex", "[a-f]{6}"), hot),
        opening(3, Constraint("regex", "("), greedy),
    ]
    length = len(known.prompts[0])
    output = runner.execute(StepInput(ints(range(4)), ints([length] * 4), opened=opened))
    assert output.slots.tolist() == [0, 1, 2]
    assert output.failed.tolist() == output.refused.tolist() == [3]
    texts: list[list[int]] = [[int(token)] for token in output.tokens]
    for _ in range(6):
        output = runner.execute(StepInput(ints(range(3)), ints([1] * 3)))
        for text, token in zip(texts, output.tokens.tolist(), strict=True):
            text.append(token)
    free = known.answers[0][:7]
    assert texts[0][: len(free)] == free
    for text in texts[1:]:
        assert text[-1] == EOS
        assert re.fullmatch("[a-f]{6}", b"".join(pieces[token] for token in text).decode())
