"""This file counts what engines of grammars let through: answers to schemas that are no JSON, or
break their schema.

The schemas are those of `tests/kernels/test_schemas.py`; a random choice among the allowed tokens
stands for a model, the library `jsonschema` is the judge. It does not know models or requests.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from bench.command import parser_of
from bench.report import Report
from kernels.batch import Constraint
from kernels.constrain import BadGrammar, Constrainer, EngineUnavailable, load_engine

ABOUT = """\
Random answers within schemas, judged by the library jsonschema: how many an engine of grammars let
through that are no JSON, or break their schema; how many schemas it refused; how many answers did
not end. `keywords`: of schemas, that the answers broke.

  python -m app bench schemas
  python -m app bench schemas --engines xgrammar --answers 1 --show 5

Needs a checkout with its `dev` packages, no model.
"""
TOKENS_MAX = 300  # of an answer
NO_JSON = "no JSON"
COMBINING = ("allOf", "then", "else")  # what is broken in these says less than that they are


class Answer(NamedTuple):
    """What was said, None where it did not end, and what it breaks: see `broken_by`."""

    said: bytes | None
    broken: str | None = None


def main(words: Sequence[str]) -> int:
    parser = parser_of("schemas", ABOUT)
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["llguidance", "xgrammar"],
        metavar="NAME",
        help="of the grammar seam",
    )
    parser.add_argument("--answers", type=int, default=3, metavar="N", help="to each schema")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="broken answers to print of each engine"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    found = parser.parse_args(list(words))
    from tests.kernels.test_constrain import table

    report = Report("schemas", as_json=found.json)
    for name in found.engines:
        try:
            constrainer = Constrainer(load_engine(name, table()), table())
        except EngineUnavailable as reason:
            print(f"bench schemas: {reason}", file=sys.stderr)
            return 2
        report.add(engine=name, version=version_of(name), **count(constrainer, found))
    report.close()
    return 0


def version_of(engine: str) -> str:
    try:
        return metadata.version(engine)
    except metadata.PackageNotFoundError:  # `auto`, or one under another name
        return ""


def count(constrainer: Constrainer, found: argparse.Namespace) -> dict[str, Any]:
    from tests.kernels.test_schemas import KEYWORDS, schemas

    every = schemas() + KEYWORDS
    refused = unfinished = finished = 0
    broken: Counter[str] = Counter()
    for number, schema in enumerate(every):
        try:
            for nth in range(found.answers):
                answer = draw(constrainer, schema, random.Random(f"{number} {nth}"))
                if answer.said is None:
                    unfinished += 1
                    continue
                finished += 1
                if answer.broken is None:
                    continue
                broken[answer.broken] += 1
                if broken.total() <= found.show:
                    text = answer.said.decode("utf-8", "replace")
                    line = f"  {answer.broken}: {json.dumps(schema)}: {text!r}"
                    print(line, file=sys.stderr, flush=True)
        except BadGrammar:
            refused += 1
    no_json = broken.pop(NO_JSON, 0)
    return {
        "schemas": len(every),
        "refused": refused,
        "answers": finished,
        "unfinished": unfinished,
        "no_json": no_json,
        "break_schema": broken.total(),
        "keywords": ", ".join(f"{name} {times}" for name, times in broken.most_common()),
    }


def draw(constrainer: Constrainer, schema: Any, chance: random.Random) -> Answer:
    """Raises BadGrammar: the schema is refused."""
    from tests.kernels.test_constrain import bytes_of
    from tests.kernels.test_schemas import answer

    constrainer.clear()
    constrainer.open(0, Constraint("json_schema", json.dumps(schema)), [])
    tokens = answer(constrainer, chance, TOKENS_MAX)
    if tokens is None:
        return Answer(None)
    said = bytes_of(tokens)
    return Answer(said, broken_by(schema, said))


def broken_by(schema: Any, said: bytes) -> str | None:
    """The first keyword of the schema that the text breaks, NO_JSON, or None: it breaks none."""
    import jsonschema

    try:
        value = json.loads(said)
    except ValueError:  # also of what is no UTF-8
        return NO_JSON
    older = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    kind = jsonschema.Draft7Validator if older else jsonschema.Draft202012Validator
    judge = jsonschema.validators.extend(kind, {"pattern": pattern_errors})
    for error in judge(schema).iter_errors(value):
        path = error.absolute_schema_path
        return str(next((part for part in path if part in COMBINING), error.validator))
    return None


def pattern_errors(judge: Any, pattern: str, value: Any, schema: Any) -> Iterator[Exception]:
    r"""The keyword `pattern`: \w, \d and their opposites know ASCII alone, as in ECMAScript."""
    import jsonschema

    if isinstance(value, str) and not re.search(pattern, value, re.ASCII):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
