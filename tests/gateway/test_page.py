"""The page at `/`: escaped, readable without a script, and no other script than ours may run."""

from __future__ import annotations

import re

import msgspec

from actors.gateway.page import POLICY, SCRIPT, STYLE, hash_source, status_page
from messages.system import ActorRow, State
from tests.gateway.street import Street

ROW = ActorRow(
    path="replica/<worker>",
    node="worker",
    pid=7,
    state=State.RUNNING,
    incarnation=2,
    restarts=1,
    busy_with="Step",
    busy_s=0.25,
    handle_p50_s=0.0005,
)


def test_what_is_not_ours_is_escaped() -> None:
    page = status_page('"><script>x</script>', ["<b>"], [ROW], 3)
    assert page.count("<script>") == 1 and "not serving: <b>" not in page
    assert "replica/&lt;worker&gt;" in page
    assert "not serving: &lt;b&gt;" in page
    assert "open calls: 3" in page and "Step for 0.2 s" in page
    assert "<td>0.50 ms</td><td></td>" in page


def test_what_was_seen_a_while_ago_says_so() -> None:
    row = msgspec.structs.replace(ROW, age_s=4.2)
    assert "<td>Step for 0.2 s (4 s ago)</td>" in status_page("m", [], [row], 0)


def test_the_policy_names_the_script_and_the_style_that_are_sent() -> None:
    page = status_page("m", [], [ROW], 0)
    for tag, text in (("script", SCRIPT), ("style", STYLE)):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        assert found is not None and found[1] == text
        assert f"{tag}-src {hash_source(text)}" in POLICY
    assert "unsafe" not in POLICY


def test_what_the_script_looks_for_is_on_the_page() -> None:
    page = status_page("m", [], [ROW], 0)
    names = set(re.findall(r'at\("(\w+)"\)', SCRIPT))
    assert names == {"talk", "chat", "prompt", "send", "load", "actors"}
    assert all(f'id="{name}"' in page for name in names)


async def test_the_page_is_served_with_its_policy() -> None:
    street = Street()
    got = await street.ask(street.request("GET", "/"))
    assert got.status == 200
    assert got.headers["content-security-policy"] == POLICY
    assert b"Histrio" in got.body
