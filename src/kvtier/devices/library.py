"""A vendor's driver library, bound at run time: no header, no toolkit, no build flag."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from typing import Any

from kvtier.core.errors import DeviceError

Function = Callable[..., int]
"""A C function that returns 0 or an error code. ctypes releases the GIL during the call."""


@dataclass(frozen=True, slots=True)
class Call:
    """One function of a driver.

    arguments: ctypes types.
    since: the version that introduced it.
    without: what is used if it is missing; "" if it is required.
    """

    name: str
    arguments: tuple[Any, ...]
    since: str = ""
    without: str = ""
    returns: Any = c_int


class DriverError(DeviceError):
    """A driver call returned an error. code: the vendor's error code."""

    def __init__(self, call: str, code: int, meaning: str) -> None:
        super().__init__(f"{call} answered {code} ({meaning})")
        self.call = call
        self.code = code


class Library:
    """The functions of one shared library, by name.

    names: file names to try, in this order.
    override: environment variable that names the file instead.
    calls: functions to bind.
    meaning: returns the text for an error code.
    Raises ``DeviceError`` if no file can be loaded, or a required function is missing.
    """

    def __init__(
        self,
        names: Sequence[str],
        override: str,
        calls: Sequence[Call],
        meaning: Callable[[Library, int], str],
    ) -> None:
        self._library = _load(names, override)
        self._meaning = meaning
        self._functions: dict[str, Function] = {}
        self.missing: list[Call] = []
        for call in calls:
            found = getattr(self._library, call.name, None)
            if found is not None:
                self.bind(call, found)
            elif call.without:
                self.missing.append(call)
            else:
                raise DeviceError(
                    f"{self.path} has no {call.name}: it is too old, or not the driver's library; "
                    f"name another file in {override}"
                )

    @property
    def path(self) -> str:
        """Name of the loaded file."""
        return str(self._library._name)

    def bind(self, call: Call, function: Any) -> None:
        """Add a function that was looked up in another way."""
        function.argtypes, function.restype = call.arguments, call.returns
        self._functions[call.name] = function
        self.missing = [each for each in self.missing if each.name != call.name]

    def has(self, name: str) -> bool:
        return name in self._functions

    def function(self, name: str) -> Function:
        """Return the function itself, for loops; the caller checks its result."""
        return self._functions[name]

    def call(self, name: str, *arguments: object) -> None:
        """Call ``name``. Raises ``DriverError`` unless it returns 0."""
        self.check(name, self._functions[name](*arguments))

    def check(self, name: str, code: int) -> None:
        """Raise ``DriverError`` unless ``code`` is 0."""
        if code:
            raise DriverError(name, code, self._meaning(self, code))

    def text(self, name: str, *arguments: object) -> str:
        """Return the string that a call returns; "" for NULL."""
        answer: Any = self._functions[name](*arguments)
        return answer.decode(errors="replace") if answer else ""

    def handle(self, name: str, *arguments: object) -> int:
        """Return the pointer that a call writes to its first argument."""
        made = c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def number(self, name: str, *arguments: object) -> int:
        """Return the int that a call writes to its first argument."""
        value = c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value


def _load(names: Sequence[str], override: str) -> ctypes.CDLL:
    chosen = os.environ.get(override, "")
    reasons = []
    for name in (chosen,) if chosen else names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    if all("cannot open shared object file" in reason for reason in reasons):
        what = f"{chosen or names[0]} is not on this machine"
    else:
        what = f"{chosen or names[0]} can't be loaded: {'; '.join(reasons)}"
    raise DeviceError(f"{what}; install the driver, or name its library in {override}")
