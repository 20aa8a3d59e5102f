"""Exceptions that kvtier raises: wrong settings or calls, and failing machines.

A miss, a full tier and a slow read are outcomes, not errors: see ``tiers.storage.Outcome``.
Every message says what went wrong, with which value, and how to fix it.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return untrusted ``text``, safe for a message or a terminal.

    Control characters and other unprintable characters are escaped.
    """
    if text.isprintable():
        return text
    # Not by the codec "unicode_escape": it is imported when it is first used, which fails in a
    # process that has no file descriptor left, and the message is lost.
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


INSTALL = 'pip install ".[{extra}]" in a clone of kvtier'
"""Command that installs an extra, for messages. Once a release is on PyPI it becomes
``pip install "kvtier[{extra}]"``. A test compares the guides' commands with it."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package, as part of a sentence."""
    return INSTALL.format(extra=extra)


class CacheError(Exception):
    """Base of every error that kvtier raises."""


class ConfigError(CacheError, ValueError):
    """A setting can't be used: the message names the field, the value and the fix."""


class UsageError(CacheError, ValueError):
    """A call breaks the contract of the cache.

    The message names the argument, its value and what is allowed. Nothing was changed.
    """


class LayoutError(CacheError):
    """Two layouts, or a layout and a memory, don't fit together."""


class TierError(CacheError):
    """A tier failed an operation: ``tier`` and ``operation`` say where, ``reason`` says why."""

    def __init__(self, tier: str, operation: str, reason: str) -> None:
        super().__init__(f"{tier} tier: {operation} failed: {reason}")
        self.tier = tier
        self.operation = operation
        self.reason = reason


class DeviceError(CacheError):
    """A device can't be used, or refused a copy."""


class Closed(CacheError):  # noqa: N818 - a state, and the word the field uses
    """The object was closed; make a new one."""
