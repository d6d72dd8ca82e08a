"""This file writes the page at `/`: is the house up, who lives there, and a box to talk in.

It does not know HTTP. What it writes is whole without a script; `page.js` keeps it fresh and talks.
Law: everything that is not ours is escaped, and the policy lets no script run but that one.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files

from messages.system import ActorRow

OLD_S = 1.0  # several heartbeats; `page.js` has it too
SCRIPT = files("actors.gateway").joinpath("page.js").read_text("utf-8")
STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;"
    "border-bottom:1px solid #8884}code{background:#8882;padding:.1rem .3rem}"
    "form{display:flex;gap:.5rem;margin:1rem 0}form[hidden]{display:none}"
    "textarea{flex:1;font:inherit;padding:.4rem}button{font:inherit;padding:0 1rem}"
    "#talk{max-height:24rem;overflow:auto}#talk p{white-space:pre-wrap;margin:.4rem 0;"
    "padding:.3rem .6rem;border-left:3px solid #8884}#talk .user{border-color:#48f}"
    "#talk .error{border-color:#e44}"
)
COLUMNS = (
    "actor",
    "state",
    "node",
    "pid",
    "incarnation",
    "restarts",
    "mailbox",
    "handler p50",
    "p99",
    "doing",
)


def hash_source(text: str) -> str:
    """How a content security policy names an inline text."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {hash_source(STYLE)}; script-src {hash_source(SCRIPT)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def status_page(
    model: str, missing: Sequence[str], rows: Sequence[ActorRow], open_count: int
) -> str:
    """One HTML document. Without scripts the browser asks for it again every five seconds."""
    state = "up" if not missing else "not serving: " + ", ".join(missing)
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    name = escape(model)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Histrio</title>'
        '<noscript><meta http-equiv="refresh" content="5"></noscript>'
        f"<style>{STYLE}</style></head><body><h1>Histrio</h1>"
        f"<p><b>{name}</b> is {escape(state)}; open calls: {open_count}.</p>"
        f'<div id="talk" aria-live="polite"></div><form id="chat" data-model="{name}" hidden>'
        '<textarea id="prompt" rows="2" aria-label="Message" placeholder="Say something to the '
        'model"></textarea><button id="send">Send</button></form><p id="load"></p>'
        f'<table><thead><tr>{head}</tr></thead><tbody id="actors">'
        f"{''.join(map(page_row, rows))}</tbody></table>"
        "<p><code>POST /v1/chat/completions</code> <code>POST /v1/completions</code> "
        '<a href="/v1/models">/v1/models</a> <a href="/health">/health</a> '
        '<a href="/metrics">/metrics</a> <a href="/actors">/actors</a> '
        '<a href="/openapi.json">/openapi.json</a></p>'
        f"<script>{SCRIPT}</script></body></html>"
    )


def page_row(row: ActorRow) -> str:
    cells = (
        row.path,
        row.state.value,
        row.node,
        row.pid,
        row.incarnation,
        row.restarts,
        row.mailbox_depth,
        milliseconds(row.handle_p50_s),
        milliseconds(row.handle_p99_s),
        doing_of(row),
    )
    return "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>"


def doing_of(row: ActorRow) -> str:
    """And when that was, where it is long ago: its node, or the root, has not been heard since."""
    doing = "" if row.busy_with is None else f"{row.busy_with} for {row.busy_s:.1f} s"
    age_s = row.age_s or 0.0
    return doing if age_s < OLD_S else f"{doing} ({age_s:.0f} s ago)".lstrip()


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.2f} ms"
