"""This file writes the series as Prometheus reads them: text format 0.0.4.

It does not know where they come from. Law: any name of ours and any label value gives text that
parses back to the same values; series of one name stand together, under one HELP and one TYPE.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from actors.metrics.board import Board
from messages.metrics import Labels

HELP = {
    "histrio_cached_tokens_total": "Prompt tokens whose KV was found in the prefix cache.",
    "histrio_dead_letters_total": "Messages that were not delivered, by kind and cause.",
    "histrio_deaths_total": "Deaths of an actor, by cause.",
    "histrio_detokenizer_dropped_total": "Tokens of requests that the detokenizer no longer has.",
    "histrio_e2e_seconds": "From the arrival of a request to its end.",
    "histrio_encode_seconds": "From the arrival of a prompt at the tokenizer to its ids.",
    "histrio_forward_seconds": "Time of one forward in the worker.",
    "histrio_stale_credits_total": "Grants that were for an earlier life of a sender or a taker.",
    "histrio_stale_steps_total": "Steps that were meant for an earlier life of the worker.",
    "histrio_generated_tokens_total": "Tokens generated.",
    "histrio_grammars_total": "Constraints that were compiled, by outcome.",
    "histrio_handler_seconds": "How long an actor handled a message, waiting included.",
    "histrio_http_requests_total": "HTTP requests, by route and status.",
    "histrio_inter_token_seconds": "Between the tokens of a request, after the first.",
    "histrio_interruptions_total": "Requests that lost a part they ran in and were sent again.",
    "histrio_link_troubles_total": "What was lost, sent again or refused on a node's links.",
    "histrio_loop_lag_seconds": "How late the event loop of a node runs.",
    "histrio_mailbox_depth": "Messages that wait for an actor.",
    "histrio_metrics_refused_total": "Series or values that the metrics actor did not take.",
    "histrio_pages": "Pages of the KV pool, by state.",
    "histrio_prompt_tokens_total": "Prompt tokens of admitted requests.",
    "histrio_queue_seconds": "From the arrival of a request at the scheduler to its admission.",
    "histrio_requests_running": "Requests that hold pages.",
    "histrio_requests_total": "Requests that ended, by outcome; a refused call counts once.",
    "histrio_requests_waiting": "Requests that wait for admission.",
    "histrio_restarts_total": "Restarts of an actor.",
    "histrio_retractions_total": "Requests that gave their pages back and wait again.",
    "histrio_step_rows": "Rows of a step.",
    "histrio_step_seconds": "From a step's leaving the scheduler to its result.",
    "histrio_streams_cut_total": "Calls that were cut because their client did not read.",
    "histrio_batch_requests_total": "Lines of batches that were run, by HTTP status.",
    "histrio_streams_open": "Calls that have not ended.",
    "histrio_submits_lost_total": "Requests that could not be passed on and had no record left.",
    "histrio_ttft_seconds": "From the arrival of a request to its first token.",
}

# Shown as 0 until the first one is counted: the increase of a series that is not there is not 0.
FROM_START: tuple[tuple[str, Labels], ...] = (
    ("histrio_cached_tokens_total", ()),
    ("histrio_generated_tokens_total", ()),
    ("histrio_interruptions_total", ()),
    ("histrio_prompt_tokens_total", ()),
    ("histrio_retractions_total", ()),
    ("histrio_streams_cut_total", ()),
    *(
        ("histrio_requests_total", (("outcome", outcome),))
        for outcome in ("abort", "error", "length", "refused", "stop")
    ),
)


def exposition(board: Board) -> str:
    """The whole page. Ends with a newline."""
    lines: list[str] = []
    counters = {**dict.fromkeys(FROM_START, 0.0), **board.counters}
    for name, rows in grouped(counters):
        head(lines, name, "counter")
        lines.extend(sample(name, labels, counters[name, labels]) for labels in rows)
    for name, rows in grouped(board.gauges):
        head(lines, name, "gauge")
        lines.extend(sample(name, labels, board.gauge((name, labels))) for labels in rows)
    for name, rows in grouped(board.histograms):
        head(lines, name, "histogram")
        for labels in rows:
            histogram = board.histograms[name, labels]
            bounds = (*histogram.bounds, math.inf)
            for bound, count in zip(bounds, histogram.cumulative(), strict=True):
                bucket = (*labels, ("le", number(bound)))
                lines.append(sample(f"{name}_bucket", bucket, count))
            lines.append(sample(f"{name}_sum", labels, histogram.total))
            lines.append(sample(f"{name}_count", labels, histogram.count))
    head(lines, "histrio_metrics_refused_total", "counter")
    lines.append(sample("histrio_metrics_refused_total", (), board.refused_count))
    return "\n".join(lines) + "\n"


def grouped(series: Iterable[tuple[str, Labels]]) -> list[tuple[str, list[Labels]]]:
    """Names in order, each with its label sets in order."""
    groups: dict[str, list[Labels]] = {}
    for name, labels in sorted(series):
        groups.setdefault(name, []).append(labels)
    return list(groups.items())


def head(lines: list[str], name: str, kind: str) -> None:
    text = HELP.get(name)
    if text is not None:
        lines.append(f"# HELP {name} {text}")
    lines.append(f"# TYPE {name} {kind}")


def sample(name: str, labels: Labels, value: float) -> str:
    if not labels:
        return f"{name} {number(value)}"
    pairs = ",".join(f'{key}="{escape(text)}"' for key, text in labels)
    return f"{name}{{{pairs}}} {number(value)}"


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
