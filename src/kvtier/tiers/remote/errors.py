"""Errors of stores. Their messages hold no secret."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818 - an outcome
    """The store said no, and will say no again."""


class Unreachable(Exception):  # noqa: N818 - an outcome
    """The store does not answer now."""


class Unsound(Exception):  # noqa: N818 - an outcome
    """The store does something else than it must: it is not to be used."""
