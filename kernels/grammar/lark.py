"""This file writes structural tags in llguidance's Lark form: free text, and what is held to.

It does not know the library nor compiles anything: rows of {trigger, begin, schema, end} in (see
`messages/types.py`), a grammar's text out. Markers that are special tokens are no text to the
library: they become references to their ids. Laws: free text holds no trigger; where a marker is a
special token, the other special tokens are free as well; nobody forbids the end of the answer
outside of a tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kernels.constrain import BadGrammar
from kernels.grammar.schema import settled

UNSATISFIABLE = "The constraint cannot be satisfied: no text matches it."
BLANK = r" \t\r\n"


class Writer:
    def __init__(self, specials: Mapping[str, int], options: Mapping[str, Any]) -> None:
        """`specials`: ids of the special tokens by text, but for those that end an answer;
        `options`: how JSON is written."""
        self.specials = specials
        self.options = options
        texts = sorted((text for text in specials if text), key=len, reverse=True)
        self.splitter = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        self.lines: list[str] = []

    def write(self, value: Any) -> str:
        """The grammar. Raises BadGrammar."""
        if isinstance(value, dict):
            self.write_first(value["first"], value["prefixes"], value["between"])
        else:
            self.write_tagged(value)
        self.lines.append("REST: /(.|\\n)*/")
        return "\n".join(self.lines)

    def write_tagged(self, rows: list[dict[str, Any]]) -> None:
        """Free text with tags in it. A trigger that is text ends a lexeme of its own, so that the
        free text, a lexeme too, can hold it only in part."""
        bodies: dict[str, list[str]] = {}
        for row in rows:
            rest = row["begin"][len(row["trigger"]) :]
            bodies.setdefault(row["trigger"], []).append(self.body(rest, row))
        names = []
        barred: set[int] = set()
        for nth, (trigger, options) in enumerate(bodies.items()):
            atoms = self.atoms(trigger)
            special = self.specials.get(self.parts(trigger)[0])
            if special is None:
                self.lines.append(f"head_{nth}[lazy]: /(.|\\n)*/ {atoms[0]}")
                head = f"head_{nth}"
            else:
                barred.add(special)
                head = f"REST {atoms[0]}"
            self.lines.append(f"tag_{nth}: {' '.join([head, *atoms[1:]])} ({' | '.join(options)})")
            names.append(f"tag_{nth}")
        free = self.free(rows, barred)
        if free:
            names.append(f"REST {free}")
        self.lines.insert(0, f"start: ({' | '.join(names)})* REST")

    def write_first(
        self, rows: list[dict[str, Any]], prefixes: list[str], between: list[str]
    ) -> None:
        """Tags from the beginning on, or text that begins with no trigger."""
        calls = " | ".join(self.body(row["begin"], row) for row in rows)
        heads = [" ".join(self.atoms(prefix)) for prefix in prefixes]
        head = f"({' | '.join(filter(None, heads))}){'?' if '' in heads else ''}"
        marks = " | ".join(" ".join(self.atoms(text)) for text in between)
        more = f" (({marks}) call)*" if between else ""
        starts = {row["trigger"] for row in rows} | set(filter(None, prefixes))
        barred = {self.specials[text] for text in starts if text in self.specials}
        texts = "".join(sorted(re.escape(text[0]) for text in starts if text not in self.specials))
        lead = f"LEAD? {head} " if any(heads) else "LEAD? "
        self.lines += ["start: calls | other", f"calls: {lead}call{more} LEAD?", f"call: {calls}"]
        free = self.free([*rows, *({"begin": text, "end": ""} for text in prefixes)], barred)
        other = f"FIRST ({free} REST)* | ({free} REST)+" if free else "FIRST"
        self.lines.append(f"other: {other}")
        self.lines.append(f"LEAD: /[{BLANK}]+/")
        self.lines.append(f"FIRST: /[{BLANK}]*([^{BLANK}{texts}](.|\\n)*)?/")

    def body(self, begin: str, row: Mapping[str, Any]) -> str:
        """What follows a trigger."""
        schema = row["schema"]
        if schema is False:
            raise BadGrammar(UNSATISFIABLE)
        parts = self.atoms(begin)
        if schema is not None:
            value = {**({} if schema is True else settled(schema)), "x-guidance": self.options}
            parts.append(f"%json {json.dumps(value)}")
        parts += self.atoms(row["end"])
        return " ".join(parts) or '""'

    def free(self, rows: Iterable[Mapping[str, Any]], barred: set[int]) -> str:
        """The special tokens that may stand in free text; "": none."""
        texts = [part for row in rows for part in self.parts(row["begin"] + row["end"])]
        if not any(text in self.specials for text in texts):
            return ""
        return token_set(sorted(set(self.specials.values()) - barred))

    def parts(self, text: str) -> list[str]:
        """Special tokens and the text between them."""
        parts = [text] if self.splitter is None else self.splitter.split(text)
        return [part for part in parts if part] or [""]

    def atoms(self, text: str) -> list[str]:
        return [
            f"<[{self.specials[part]}]>"
            if part in self.specials
            else json.dumps(part, ensure_ascii=False)
            for part in self.parts(text)
            if part
        ]


def token_set(ids: list[int]) -> str:
    """`<[3-5,9]>`"""
    ranges: list[list[int]] = []
    for token in ids:
        if ranges and ranges[-1][1] == token - 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges]
    return f"<[{','.join(texts)}]>" if texts else ""
