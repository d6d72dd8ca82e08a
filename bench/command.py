"""This file makes the parser of a bench, so that all of them are called and explained alike."""

from __future__ import annotations

import argparse


def parser_of(name: str, about: str, words: str = "[option ...]") -> argparse.ArgumentParser:
    """Of `python -m app bench NAME`; `python -m bench.NAME` is the same. `about` is shown as it
    stands: a sentence, then examples. `words`: what may follow the name."""
    command = f"python -m app bench {name}"
    return argparse.ArgumentParser(
        prog=command,
        usage=f"{command} {words}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
