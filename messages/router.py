"""This file is the router's mailbox: it takes what the scheduler takes, and picks the replica."""

from __future__ import annotations

from messages.scheduler import Cancel, Poll, Submit

In = Submit | Cancel | Poll
