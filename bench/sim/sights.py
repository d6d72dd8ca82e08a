"""This file names what is counted in simulated worlds: faults, and what must be seen sometimes.

It does not know how any of it is done or seen. A run in which something never is does not test it:
`python -m app simulate --complete` fails then.
"""

from __future__ import annotations

FAULTS = (
    "kill",
    "kill at a message",
    "kill in pairs",
    "stop",
    "stop for long",
    "crash an actor",
    "clog",
    "cut one way",
    "cut",
    "slow device",
    "launch fails",
    "killed in start",
    "crash loop",
)
MORE_FAULTS = ("restart asked for", "forward hangs", "swizzle", "everything stands still")
# What is counted when it happens, by whoever does it.
COUNTED = (
    *(fault for fault in FAULTS if fault not in ("kill at a message", "launch fails")),
    *MORE_FAULTS,
    "kill before a message",
    "kill after a message",
    "killed again",
    "launch failed",
    "frame dropped",
    "frame repeated",
    "frame cut off",
    "the wall clock was put forward",
    "the wall clock was put back",
)
# What must be seen sometimes, over many worlds: a run in which one never is does not test it.
SOMETIMES = (
    "resumed after tokens",
    "resumed with a seed",
    "resumed with a grammar: regex",
    "resumed with a grammar: choice",
    "resumed with a grammar: json_schema",
    "resumed with a grammar: ebnf",
    "resumed with a grammar: structural_tag",
    "resumed within a call of a tool",
    "a tool was called",
    "resumed with penalties",
    "resumed with log probabilities",
    "resumed with a stop string",
    "resumed within a stop string",
    "resumed with a stop pattern",
    "resumed within a character",
    "a vector or scores were asked for again",
    "a response was made in the background",
    "a response in the background was come back to",
    "a batch came to its end",
    "a batch was cancelled",
    "a batch went on after a gateway died",
    "resumed a choice other than the first",
    "resumed from cached pages",
    "tokens were forced",
    "retracted",
    "a prefix was found",
    "came back to its gateway",
    "came back to another gateway",
    "came back after its gateway died",
    "came back to other pieces than it had",
    "left, and its request ended in time",
    "drained with whole answers",
    "drained with a typed end",
    "poison was given up",
    "a grammar was refused",
    "a forward that hung was found",
    "a node that hung was killed",
    "a restart was asked for with streams open",
    "refused with Retry-After",
    "a constraint had no turn",
    "a mailbox was full",
    "a stale step was left out",
    "a dead scheduler's tokens came late",
    "a spare was used",
    "the root gave up",
    "the work of a supervisor failed",
    "drained while a part restarted",
    "all stood still, and nobody was blamed",
)
