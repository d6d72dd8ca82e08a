"""This file says what a simulated world is: what is deployed, who asks for what, what goes wrong.

It does not know how worlds are drawn (`draws.py`) nor how anything is run.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.sim.shadow import CHOICE_STRIDE, continuation
from bench.sim.text import END, VOCAB_SIZE

CONTEXT_LEN = 192
PEACE_S = 300.0  # after the last fault: by then every client has its end
# Messages that something may die at.
SITES = (
    "Step",
    "StepDone",
    "Acquire",
    "Acquired",
    "Commit",
    "Release",
    "Reserve",
    "Granted",
    "Submit",
    "Cancel",
    "Tokens",
    "StopMet",
    "Encode",
    "Encoded",
    "Deltas",
    "StartActor",
    "Ready",
    "Entries",
    "Exited",
)

# Where the actors live: as `serve` does it, as the Engine does it, and further apart.
SERVE = {
    "metrics": "front",
    "detokenizer": "front",
    "router": "front",
    "tokenizer": "front",
    "gateway": "front",
    "scheduler": "engine",
    "cache": "engine",
    "worker": "worker",
}
ENGINE = {**SERVE, "gateway": "main"}
APART = {
    "metrics": "main",
    "detokenizer": "detokenizer",
    "router": "router",
    "tokenizer": "tokenizer",
    "gateway": "main",
    "scheduler": "scheduler",
    "cache": "cache",
    "worker": "worker",
}
PLACES = {"serve": SERVE, "engine": ENGINE, "apart": APART}
# Several gateways on one port: the tree's own placement, by the number of front ends.
FRONTS = {"two fronts": 2, "three fronts": 3}

POISON = VOCAB_SIZE - 1
GRAMMARS = (
    ("regex", "[a-f0-9]{4,40}"),
    ("regex", "(yes|no)( and (yes|no)){0,8}"),
    ("choice", '["heads", "tails", "neither of the two"]'),
    ("json_schema", '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"boolean"}},'
     '"required":["a","b"],"additionalProperties":false}'),
    ("ebnf", 'root ::= item (", " item)*\nitem ::= "one" | "two" | [0-9] [0-9]'),
    ("structural_tag", '[{"trigger":"e","begin":"e=","schema":{"type":"integer"},"end":";"}]'),
    ("regex", "(yes|no){1,9}", "", "."),  # constrained behind the first full stop
)  # fmt: skip
LONG_GRAMMARS = (
    ("regex", "((heads|tails|neither of the two), ){6,20}end"),
    ("choice", '["all of the heads and none of the tails","all of the tails but the last"]'),
    ("json_schema",
     '{"type":"array","minItems":6,"items":{"type":"integer","minimum":0,"maximum":99}}'),
    ("ebnf", 'root ::= item ", " item ", " item ", " item ", " item (", " item)*\n'
     'item ::= "one" | "two" | [0-9] [0-9]'),
    ("structural_tag", '[{"trigger":"e","begin":"e=","schema":{"type":"integer"},"end":";"},'
     '{"trigger":"a","begin":"a=","schema":{"enum":["one of two","two of two"]},"end":";"}]'),
)  # fmt: skip
WORDS = ("one", "small", "letter", "naïve", "→", "house", "in", "the", "sound", "猫")
IMPOSSIBLE = ("regex", "[z&&a]x(")


# A text that may be within this stop string wherever it is gone on from.
LONG_STOP = ("aab", ("regex", "a{40,70}b( [a-z]{1,9}){0,3}"))
# What chats may call, and the one that some of them name.
CALLED = "book"
TOOL_WAYS = ("required", "single", "named")
# And what they may call or not: strict tools, one call of such, tools that are not strict, one of
# several strict tools.
CHOICE_WAYS = ("auto", "auto single", "loose", "allowed")
FORM_NAMES = ("hermes", "deepseek", "mistral", "json", "llama3", "pythonic")  # of `habit.FORMS`
PLEASE = "please"  # the first word to a model that is to think of its tools
TOOLS = (
    {"type": "function", "function": {"name": "look", "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["the house", "the letter"]}, "for": {"type": "integer"}},
        "required": ["at"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": CALLED, "parameters": {
        "type": "object",
        "properties": {"days": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
                       "is_small": {"type": "boolean"}},
        "required": ["days", "is_small"], "additionalProperties": False}}},
)  # fmt: skip


class Shape(NamedTuple):
    """The deployment."""

    placement: str
    page_size: int
    kv_tokens: int
    running_max: int
    queued_max: int
    prefill_budget: int
    policy: str
    prefix_cache: bool
    credits: int
    step_s: float
    delay_s: float
    heartbeat_s: float
    hang_s: float
    launch_s: float
    restarts_max: int
    mailbox_max: int  # of front rooms; 0: as they are
    shuffles: bool  # the order of callbacks is the seed's as well
    waits: bool = False  # those rooms make who sends to them wait, instead of refusing
    spares: bool = False  # a process in reserve for each: the second launch takes no time
    compile_s: float = 0.0  # how long the worker takes for a grammar
    grammar_timeout_s: float = 10.0
    encode_s: float = 0.0  # mean of what any work in a thread takes, a prompt's encoding for one
    resume_s: float = 10.0  # how long a stream is kept for a client that was cut
    resume_streams_max: int = 128
    jumps_vary: bool = False  # a worker appends as many forced tokens as chance says
    batches: bool = False  # gateways keep files, and run batches
    wear_max: int = 0  # tokens after which a grammar is spent for all who share it; 0: never
    form: str = ""  # in which the model writes calls that it chooses; empty: what its template says


class Ask(NamedTuple):
    """One call of one client."""

    name: str
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    ignore_eos: bool
    stop_ids: tuple[int, ...]
    stop: str
    logprobs: bool
    choice_count: int
    namespace: str
    # plain | slow | stuck | leaves | hasty | http [leaves | slow | whole | returns | hasty |
    # background | native | batch]
    reader: str
    after: int  # tokens until it is stuck or leaves
    pause_s: float  # of a slow one, between reads; of a hasty one, until it leaves
    front: int = 0  # which of several gateways it comes to first
    penalised: bool = False
    grammar: tuple[str, ...] = ()  # kind and text
    is_impossible: bool = False  # its grammar is one that the worker refuses
    meets: str = ""  # what its own text is to meet: a stop "string" or "pattern"
    stop_pattern: str = ""  # all its matches are of one length
    wants: str = ""  # instead of text: "vector" or "scores"
    text: str = ""  # what `prompt` is made from, where it is given as text
    lines: tuple[Ask, ...] = ()  # of a batch
    tools: str = ""  # one of `TOOL_WAYS`, for a chat that must call; of `CHOICE_WAYS`, that may
    form: str = ""  # of its deployment, where it may

    def tokens(self, choice: int) -> list[int]:
        """What it gets: a plain function of what it asks."""
        tokens = continuation(
            list(self.prompt),
            self.max_tokens,
            namespace=self.namespace,
            seed=self.seed + CHOICE_STRIDE * choice,
            vocab_size=VOCAB_SIZE,
        )
        ends = set(self.stop_ids) | (set() if self.ignore_eos else {END})
        for index, token in enumerate(tokens):
            if token in ends:
                return tokens[: index + 1]
        return tokens


class Menu(NamedTuple):
    """How often each fault comes, relative to the others, and the rates of the wire."""

    gap_s: float  # mean time between faults
    weights: dict[str, float]
    drop: float
    repeat: float
    sites: tuple[str, ...] = SITES  # messages at which "kill at a message" comes
    passes_max: int = 30  # so many may go by before
    restarted: tuple[str, ...] = ()  # of whom a new life is asked for; empty: of anybody


class Again(NamedTuple):
    """The same server, started anew on the same disk; perhaps with its actors placed otherwise."""

    placement: str
    asks: tuple[Ask, ...]


class Drain(NamedTuple):
    """SIGTERM at the end of the world, with work under way."""

    asks: tuple[Ask, ...]
    after_s: float
    grace_s: float
    kills: bool = False  # something dies just before: the server ends while it restarts
    again: Again | None = None  # what comes after it


class Leap(NamedTuple):
    """The wall clock is put forward, or back. Nothing but its readers is to notice."""

    at_s: float
    by_s: float


class Scenario(NamedTuple):
    seed: int
    duration_s: float
    shape: Shape
    asks: tuple[Ask, ...]
    menu: Menu
    poison: int | None = None  # the worker dies of a prompt that begins with this token
    drain: Drain | None = None
    spoils: bool = False  # the work of a supervisor fails, which nobody foresaw
    leaps: tuple[Leap, ...] = ()
