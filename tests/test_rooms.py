"""This file is the law of imports: who may import what, as a table, checked over every file's AST.

It reads files and runs a few probes; it imports nothing of ours. Imports in functions count too,
since the walk sees the whole tree. The first matching rule holds; a file that matches none is an
error: every file lives in a room.
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

ROOMS = (
    "cache",
    "detokenizer",
    "gateway",
    "metrics",
    "router",
    "scheduler",
    "tokenizer",
    "worker",
)

STDLIB = frozenset(sys.stdlib_module_names)
# Time, chance and I/O are arguments of a core, so that it can be replayed.
IMPURE = frozenset(
    {
        "asyncio",
        "concurrent",
        "ctypes",
        "fcntl",
        "mmap",
        "multiprocessing",
        "os",
        "queue",
        "random",
        "secrets",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "uuid",
    }
)
PURE = STDLIB - IMPURE
DEVICE = ("torch", "triton", "flashinfer", "numpy", "safetensors", "gguf", "transformers")


class Rule(NamedTuple):
    """`{room}` in the pattern is each of ROOMS, and stands for the same room in `allowed`."""

    pattern: str
    allowed: tuple[str, ...]
    stdlib: frozenset[str] = STDLIB
    forbidden: tuple[str, ...] = ()  # of what `allowed` would let pass


RUNTIME_MESSAGES = ("messages.base", "messages.system", "messages.log")
ROOM_MESSAGES = ("messages",)
NOT_ROOMS = (
    "messages.anthropic",
    "messages.native",
    "messages.ollama",
    "messages.openai",
    "messages.responses",
)

# Every seam is a registry, so the type of one is known everywhere but in the messages.
SEAM = "kernels.registry"
# Pure, and the same law for steps in flight as for messages.
CREDIT = "actors.runtime.credit"
AROUND = ("actors.runtime", "actors.resolve", "actors.settings", "actors.source", "actors.tree")

RULES: tuple[Rule, ...] = (
    Rule("messages/*", ("msgspec", "messages"), PURE),
    Rule("kernels/registry.py", (), STDLIB),
    Rule(
        "kernels/grammar/*",
        ("numpy", "torch", "llguidance", "xgrammar", "kernels"),
        STDLIB - {"asyncio"},
    ),
    Rule("kernels/*", (*DEVICE, "kernels"), STDLIB - {"asyncio"}),
    # The runtime knows no room, and of the messages only its own.
    Rule(
        "actors/runtime/transport/zmq.py",
        ("msgspec", "zmq", *RUNTIME_MESSAGES, "actors.runtime"),
    ),
    Rule("actors/runtime/log.py", ("msgspec", "structlog", *RUNTIME_MESSAGES, "actors.runtime")),
    Rule(
        "actors/runtime/restart.py",
        ("msgspec", *RUNTIME_MESSAGES, "actors.runtime.spec"),
        PURE | {"random"},
    ),
    Rule("actors/runtime/*", ("msgspec", "structlog", *RUNTIME_MESSAGES, "actors.runtime")),
    # The one door to the device.
    Rule(
        "actors/worker/*",
        (
            "msgspec",
            *ROOM_MESSAGES,
            "actors.runtime",
            "actors.processors",
            "actors.vocab",
            "actors.worker",
            "kernels",
            "torch",
            "numpy",
        ),
        STDLIB,
        NOT_ROOMS,
    ),
    # The places that speak HTTP.
    *(
        Rule(
            f"actors/gateway/{name}",
            ("msgspec", "starlette", "messages", "actors.runtime", "actors.gateway"),
        )
        for name in ("http.py", "exchange.py", "doors/*")
    ),
    Rule("actors/gateway/site.py", ("uvicorn", "h11", "messages.config", "actors.gateway")),
    Rule(
        "actors/gateway/actor.py",
        ("msgspec", "messages", "actors.runtime", "actors.gateway"),
    ),
    *(
        Rule(
            f"actors/gateway/{name}.py",
            ("msgspec", "messages", "actors.runtime.context", "actors.gateway"),
            PURE,
        )
        for name in ("calls", "recovery", "controls")
    ),
    Rule("actors/gateway/stream.py", ("messages", "actors.gateway"), PURE | {"asyncio"}),
    Rule("actors/gateway/*", ("msgspec", "messages", "actors.gateway"), PURE),
    # What tokenizer and detokenizer know in common: a library, not a room (nobody lives there).
    Rule("actors/processors/*", ("msgspec", "actors.processors"), PURE),
    # Rooms of one process load it together, each in a thread of its own.
    Rule("actors/vocab/shared.py", ("actors.vocab",), PURE | {"threading"}),
    Rule("actors/vocab/*", ("msgspec", "tokenizers", "actors.vocab"), PURE | {"os", "mmap"}),
    # Files that need a library of their trade.
    Rule("actors/tokenizer/sandbox.py", ("jinja2", "markupsafe"), PURE),
    *(
        Rule(
            f"actors/tokenizer/{name}.py",
            ("jinja2", "markupsafe", "msgspec", *ROOM_MESSAGES, "actors.tokenizer", "actors.vocab"),
            PURE,
            NOT_ROOMS,
        )
        for name in ("chat", "sandbox")
    ),
    Rule(
        "actors/*tokenizer/actor.py",
        (
            "msgspec",
            *ROOM_MESSAGES,
            "actors.processors",
            "actors.runtime",
            "actors.{room}",
            "actors.vocab",
        ),
        STDLIB,
        NOT_ROOMS,
    ),
    Rule(
        "actors/*tokenizer/*",
        ("msgspec", *ROOM_MESSAGES, "actors.processors", "actors.{room}", "actors.vocab"),
        PURE,
        NOT_ROOMS,
    ),
    # Every room: its actor may touch the event loop, its cores are pure.
    Rule(
        "actors/{room}/actor.py",
        ("msgspec", *ROOM_MESSAGES, "actors.runtime", "actors.{room}"),
        STDLIB,
        NOT_ROOMS,
    ),
    Rule("actors/{room}/*", ("msgspec", *ROOM_MESSAGES, "actors.{room}", CREDIT), PURE, NOT_ROOMS),
    # Around the rooms.
    Rule("actors/__init__.py", (), PURE),
    Rule("actors/settings.py", ("msgspec", "messages.config"), PURE),
    Rule("actors/resolve.py", ("msgspec", "messages"), PURE, NOT_ROOMS),
    Rule("actors/tree.py", ("msgspec", "messages", "actors.runtime"), PURE, NOT_ROOMS),
    Rule("actors/source.py", ("huggingface_hub", "tqdm", "structlog")),
    Rule("actors/run.py", ("messages", "actors.plugins", *AROUND), STDLIB, NOT_ROOMS),
    Rule("actors/engine.py", ("msgspec", "messages", "actors.gateway", "actors.run", *AROUND)),
    Rule("actors/commands.py", ("actors.settings",), PURE),
    Rule("actors/console.py", ("msgspec", "tqdm", "actors.engine", "actors.settings")),
    Rule("actors/doctor.py", ("messages.config",)),
    Rule("actors/plugins.py", ("kernels.registry",)),
    Rule("actors/top.py", ()),
    Rule(
        "app.py",
        (
            "messages",
            "actors.commands",
            "actors.console",
            "actors.doctor",
            "actors.engine",
            "actors.plugins",
            "actors.run",
            "actors.top",
            *AROUND,
        ),
    ),
    # Proof may look everywhere.
    Rule("bench/*", ("",)),
    Rule("tests/*", ("",)),
)


def files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if not any(part.startswith(".") or part in ("build", "docs") for part in parts):
            yield path


def rules(room: str | None) -> Iterator[Rule]:
    for rule in RULES:
        of_room = any("{room}" in text for text in (rule.pattern, *rule.allowed))
        if not of_room:
            yield rule
        elif room is not None:
            yield rule._replace(
                pattern=rule.pattern.format(room=room),
                allowed=tuple(name.format(room=room) for name in rule.allowed),
            )


def rule_of(name: str) -> Rule | None:
    parts = name.split("/")
    room = parts[1] if parts[0] == "actors" and len(parts) > 2 and parts[1] in ROOMS else None
    return next((rule for rule in rules(room) if fnmatch.fnmatchcase(name, rule.pattern)), None)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported module with its line; a relative import begins with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from actors import worker` imports a module too: judge base and name together.
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}" if is_package(base) else base


def is_package(name: str) -> bool:
    return (ROOT / name.replace(".", "/") / "__init__.py").exists()


def within(name: str, allowed: str) -> bool:
    return allowed == "" or name == allowed or name.startswith(allowed + ".")


def broken(name: str, source: str) -> list[str]:
    """What `source` imports and, as the file `name`, must not."""
    rule = rule_of(name)
    if rule is None:
        return [f"{name}: matches no rule; every file lives in a room"]
    found = []
    for line, module in imports(ast.parse(source)):
        top = module.split(".")[0]
        if module.startswith("."):
            found.append(f"{name}:{line}: relative import {module}")
        elif top == "__future__" or top in rule.stdlib:
            continue
        elif within(module, SEAM) and not name.startswith("messages/"):
            continue
        elif not any(within(module, allowed) for allowed in rule.allowed) or any(
            within(module, forbidden) for forbidden in rule.forbidden
        ):
            found.append(f"{name}:{line}: must not import {module}")
    return found


def test_every_file_keeps_the_law_of_imports() -> None:
    found = [
        line
        for path in files()
        for line in broken(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("messages/base.py", "import actors.runtime"),
        ("messages/base.py", "import time"),
        ("kernels/runner.py", "import asyncio"),
        ("kernels/runner.py", "from messages import worker"),
        ("actors/runtime/node.py", "import messages.scheduler"),
        ("actors/runtime/node.py", "import zmq"),
        ("actors/scheduler/actor.py", "import torch"),
        ("actors/scheduler/actor.py", "from actors.cache import radix"),
        ("actors/scheduler/actor.py", "from actors import cache"),
        ("actors/scheduler/actor.py", "from messages import openai"),
        ("actors/scheduler/planner.py", "import random"),
        ("actors/scheduler/planner.py", "def plan():\n    import time"),
        ("actors/scheduler/planner.py", "from actors.runtime import context"),
        ("actors/scheduler/planner.py", "from . import queue"),
        ("actors/gateway/openai.py", "import starlette"),
        ("actors/tree.py", "import actors.worker.actor"),
        ("app.py", "import torch"),
        ("actors/loose.py", ""),
    ],
)
def test_a_broken_law_is_found(name: str, source: str) -> None:
    assert broken(name, source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("actors/scheduler/actor.py", "import asyncio\nfrom actors.scheduler import planner"),
        ("actors/scheduler/planner.py", "from messages.worker import Step"),
        ("actors/worker/actor.py", "from kernels.runner import Runner"),
        ("actors/runtime/transport/zmq.py", "import zmq\nfrom messages import base, system"),
    ],
)
def test_a_kept_law_passes(name: str, source: str) -> None:
    assert not broken(name, source)


def loaded_after(statement: str) -> set[str]:
    """Top-level names in `sys.modules` of a fresh interpreter after `statement`; of `kernels` also
    its modules, but for the seam's."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr
    modules = set(ran.stdout.split()) - {SEAM}
    return {m if m.startswith("kernels.") else m.split(".")[0] for m in modules}


def test_starting_the_scheduler_loads_no_device_and_no_wire_library() -> None:
    loaded = loaded_after("import actors.scheduler.actor, actors.cache.actor")
    assert not loaded & {"torch", "zmq", "starlette", "uvicorn", "tokenizers"}
    assert not any(name.startswith("kernels.") for name in loaded)


def test_front_rooms_load_no_torch() -> None:
    loaded = loaded_after("import actors.gateway.actor, actors.tokenizer.actor, actors.tree")
    assert not loaded & {"torch", "transformers"}
    assert not any(name.startswith("kernels.") for name in loaded)


def test_kernels_load_without_any_actor() -> None:
    loaded = loaded_after("import kernels.runner")
    assert not loaded & {"actors", "messages", "zmq", "starlette"}


def test_the_command_line_loads_only_the_standard_library() -> None:
    # Each spawned child of `python -m app` may execute app.py again.
    before, after = loaded_after(""), loaded_after("import app")
    assert not {name for name in after - before if name not in STDLIB} - {"app"}


def test_the_package_kernels_itself_imports_nothing() -> None:
    # A library that looks for another distribution of this name imports ours.
    before, after = loaded_after(""), loaded_after("import kernels")
    assert after - before == {"kernels"}
