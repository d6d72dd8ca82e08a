"""This file decides who may do what: keys, levels of routes, and which web pages may ask.

It does not know HTTP's machinery, files or the environment: keys come as text, a request as its
method, path and two headers. Without keys every route but the control routes is open.
Laws: a path that no table names needs a key as soon as there is one, also where no route is;
control routes need an admin key always, so that without one they are refused; every key is compared
in a time that does not depend on where it differs; no key is ever in a message.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple


class KeysWrong(ValueError):
    """A source of keys that cannot be meant so. The message is for the operator."""


class Level(enum.Enum):
    OPEN = "open"  # for everybody
    KEY = "key"  # needs a key where there are any
    ADMIN = "admin"  # needs an admin key


OPEN = frozenset({"/health", "/ready"})
METRICS = "/metrics"
# What changes the state of the whole house, for all its clients. Beside these: all below /actors/.
CONTROL = frozenset(
    {
        "/abort_request",
        "/continue_generation",
        "/flush_cache",
        "/pause_generation",
    }
)
CONTROL_BELOW = "/actors/"


class Denied(NamedTuple):
    status: int
    message: str


def read_keys(text: str, source: str) -> tuple[str, ...]:
    """One key a line or between commas; a line that begins with # is none. Raises KeysWrong where
    there is no key in it: an empty secret must not open the house."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    keys = tuple(key.strip() for line in lines for key in line.split(",") if key.strip())
    if not keys:
        raise KeysWrong(f"{source} holds no key")
    for key in keys:
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise KeysWrong(f"{source} holds a key that no header can carry")
    return keys


class Access:
    def __init__(
        self,
        keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        *,
        metrics_open: bool = False,
    ) -> None:
        self._keys = tuple(digest(key.encode()) for key in keys)
        self._admin_keys = tuple(digest(key.encode()) for key in admin_keys)
        self._metrics_open = metrics_open

    @property
    def is_open(self) -> bool:
        """There are no keys."""
        return not self._keys

    def level(self, path: str) -> Level:
        if path in OPEN or (self._metrics_open and path == METRICS):
            return Level.OPEN
        if path in CONTROL or path.startswith(CONTROL_BELOW):
            return Level.ADMIN
        return Level.KEY

    def judge(self, path: str, authorization: str | None, x_api_key: str | None) -> Denied | None:
        """None: let it in. An admin key opens every door."""
        level = self.level(path)
        if level is Level.OPEN or (level is Level.KEY and self.is_open):
            return None
        if level is Level.ADMIN and not self._admin_keys:
            return Denied(403, "Control routes need an admin key, and this server has none.")
        given = given_key(authorization, x_api_key)
        if given is None:
            return Denied(401, "This needs a key: `Authorization: Bearer KEY`.")
        is_admin = among(given, self._admin_keys)
        if is_admin or (level is Level.KEY and among(given, self._keys)):
            return None
        if level is Level.ADMIN and among(given, self._keys):
            return Denied(403, "This needs an admin key.")
        return Denied(401, "The key is not valid here.")


def given_key(authorization: str | None, x_api_key: str | None) -> bytes | None:
    """A bearer token, or what Anthropic's clients send."""
    if authorization is not None:
        scheme, _, rest = authorization.partition(" ")
        key = rest.strip()
        return key.encode("latin-1") if scheme.lower() == "bearer" and key else None
    return x_api_key.strip().encode("latin-1") if x_api_key and x_api_key.strip() else None


def digest(key: bytes) -> bytes:
    """Of one length for every key, so that lengths are not told either."""
    return sha256(key).digest()


def among(given: bytes, digests: tuple[bytes, ...]) -> bool:
    """Looks at all of them, whichever fits."""
    found = False
    own = digest(given)
    for other in digests:
        found |= hmac.compare_digest(own, other)
    return found


Headers = tuple[tuple[bytes, bytes], ...]
EXPOSED = b"x-request-id, request-id, retry-after, x-stream-id"
METHODS = b"GET, POST, DELETE, PUT, OPTIONS"
PREFLIGHT_S = b"600"


class Cors:
    """Which web pages may read answers: their origins, or `*` for all. No cookies, ever."""

    def __init__(self, origins: str = "") -> None:
        self._origins = frozenset(origin.strip().rstrip("/") for origin in origins.split(","))
        self._origins -= {""}

    def headers(self, origin: str | None) -> Headers:
        """What every answer to a page of `origin` carries."""
        if origin is None or not self._origins:
            return ()
        if "*" in self._origins:
            return (
                (b"access-control-allow-origin", b"*"),
                (b"access-control-expose-headers", EXPOSED),
            )
        if origin not in self._origins:
            return ((b"vary", b"Origin"),)
        return (
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", EXPOSED),
            (b"vary", b"Origin"),
        )

    def preflight(self, asked_headers: str | None) -> Headers:
        """What a browser wants to know before it asks; beside `headers`."""
        asked = (asked_headers or "authorization, content-type").encode("latin-1")
        return (
            (b"access-control-allow-methods", METHODS),
            (b"access-control-allow-headers", asked),
            (b"access-control-max-age", PREFLIGHT_S),
        )

    @property
    def is_on(self) -> bool:
        return bool(self._origins)
