"""This file measures the cache's cores: prompts a second matched, inserted, evicted, by page size.

No actor or mailbox is involved.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Sequence

from actors.cache.ledger import Ledger
from bench.command import parser_of
from bench.report import Report
from messages.cache import Candidate
from messages.scheduler import Acquired
from messages.types import pack

ABOUT = """\
The cache's cores: prompts a second that are matched, inserted, evicted, by page size.

  python -m app bench radix
  python -m app bench radix --page-sizes 16 --prompts 4000 --length 4096

Conversations share a system prompt of half their length and grow by turns, as a server sees them.
"""
SYSTEMS = 8  # different system prompts


def make_prompts(count: int, length: int, seed: int) -> list[bytes]:
    """Half of each prompt is one of a few beginnings, the rest its own."""
    rng = random.Random(seed)
    systems = [[rng.randrange(32_000) for _ in range(length // 2)] for _ in range(SYSTEMS)]
    return [
        pack([*rng.choice(systems), *(rng.randrange(32_000) for _ in range(length // 2))])
        for _ in range(count)
    ]


def timed(work: Callable[[], None]) -> float:
    """Seconds of CPU."""
    gc.collect()
    begin_s = time.process_time()
    work()
    return time.process_time() - begin_s


def run(ledger: Ledger, prompts: Sequence[bytes], length: int) -> None:
    """Each prompt from admission to its end."""
    for index, tokens in enumerate(prompts):
        name = f"r{index}"
        answer = ledger.acquire(name, 1, tokens)
        assert isinstance(answer, Acquired)
        ledger.commit(name, 1, length)
        ledger.release(name, 1, tokens)


def measure(page_size: int, count: int, length: int, seed: int) -> dict[str, float]:
    """Microseconds a prompt, for each of what the cache does."""
    prompts = make_prompts(count, length, seed)
    page_count = (count + SYSTEMS) * (length // page_size + 2)
    ledger = Ledger(page_count, page_size)
    insert_s = timed(lambda: run(ledger, prompts, length))
    rows = tuple(Candidate(tokens) for tokens in prompts)
    match_s = timed(lambda: [ledger.probe(rows)].clear())
    again_s = timed(lambda: run(ledger, prompts, length))
    cached_count = ledger.counts().cached

    ledger.reserve(ledger.counts().free)  # from here on every page has to be evicted for

    def evict() -> None:
        for _ in range(cached_count // 64):
            ledger.reserve(64)

    evict_s = timed(evict)
    assert ledger.counts().cached == cached_count % 64, f"{ledger.counts()}"
    full = Ledger(page_count // 4, page_size)
    churn_s = timed(lambda: run(full, prompts, length))
    ledger.check()
    full.check()
    return {
        "insert_us": 1e6 * insert_s / count,
        "match_us": 1e6 * match_s / count,
        "hit_us": 1e6 * again_s / count,
        "churn_us": 1e6 * churn_s / count,
        "evict_us_per_page": 1e6 * evict_s / max(cached_count, 1),
        "match_tokens_per_s": count * length / match_s,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one row for each page size."""
    parser = parser_of("radix", ABOUT)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="tokens")
    parser.add_argument("--prompts", type=int, default=1000, help="of each size")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args(argv)
    report = Report(
        "radix", as_json=arguments.json, prompts=arguments.prompts, length=arguments.length
    )
    for page_size in arguments.page_sizes:
        figures = measure(page_size, arguments.prompts, arguments.length, arguments.seed)
        report.add(page_size=page_size, **figures)
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
