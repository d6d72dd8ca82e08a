"""This file writes the small page at `/`: is the house up, and who lives there.

It does not know HTTP. Law: everything that is not ours is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from messages.system import ActorRow

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;"
    "border-bottom:1px solid #8884}code{background:#8882;padding:.1rem .3rem}"
)
COLUMNS = ("actor", "state", "node", "pid", "incarnation", "restarts", "mailbox", "doing")


def status_page(
    model: str, missing: Sequence[str], rows: Sequence[ActorRow], open_count: int
) -> str:
    """One HTML document; the browser asks again every five seconds."""
    state = "up" if not missing else "not serving: " + ", ".join(missing)
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="refresh" content="5"><title>Histrio</title>'
        f"<style>{STYLE}</style></head><body><h1>Histrio</h1>"
        f"<p><b>{escape(model)}</b> is {escape(state)}; open calls: {open_count}.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(page_row, rows))}</tbody>"
        "</table><p><code>POST /v1/chat/completions</code> <code>POST /v1/completions</code> "
        '<a href="/v1/models">/v1/models</a> <a href="/health">/health</a> '
        '<a href="/metrics">/metrics</a> <a href="/actors">/actors</a></p></body></html>'
    )


def page_row(row: ActorRow) -> str:
    doing = "" if row.busy_with is None else f"{row.busy_with} for {row.busy_s:.1f} s"
    cells = (
        row.path,
        row.state.value,
        row.node,
        row.pid,
        row.incarnation,
        row.restarts,
        row.mailbox_depth,
        doing,
    )
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"
