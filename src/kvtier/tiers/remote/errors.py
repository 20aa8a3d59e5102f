"""Errors of stores. Their messages contain no secrets."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818 - an outcome
    """The store refused, and will refuse again."""


class Unreachable(Exception):  # noqa: N818 - an outcome
    """The store does not answer now."""


class Unsound(Exception):  # noqa: N818 - an outcome
    """The store does not behave as required and must not be used."""


class Unwritable(Exception):  # noqa: N818 - an outcome
    """The store is full or read-only now. Reads are not affected."""
