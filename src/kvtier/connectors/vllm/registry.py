"""vLLM's table of connectors, with kvtier's in front of whatever is at one name.

A platform's plug-in (vllm-ascend's) puts its own connector there, and nobody says whose plug-in
vLLM calls first: so the table itself remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.connectors.vllm import contract

Loader = Callable[[], type]


class Connectors(dict[str, Loader]):
    """Loaders by name; what is set at ``name``, now or later, is loaded by ``InPlaceOf`` it."""

    def __init__(self, theirs: Mapping[str, Loader], name: str) -> None:
        super().__init__(theirs)
        self._name = name
        if name in self:
            self[name] = self[name]

    def __setitem__(self, name: str, loader: Loader) -> None:
        if name == self._name and not isinstance(loader, InPlaceOf):
            loader = InPlaceOf(loader)
        super().__setitem__(name, loader)


class InPlaceOf:
    """Loads the connector of ours that stands in the place of theirs, and makes theirs for whoever
    did not ask for kvtier. theirs: loads it.

    A vLLM that kvtier can't serve gets theirs alone. One whose platform has a connector for another
    version of vLLM gets ours over vLLM's own.
    """

    def __init__(self, theirs: Loader) -> None:
        self._theirs = theirs

    def __call__(self) -> type:
        if contract.VLLM.differences():
            return self._theirs()
        from kvtier.connectors.vllm.connector import KvtierConnector, over

        try:
            theirs = self._theirs()
        except ImportError as error:
            return type("KvtierConnector", (KvtierConnector,), {"theirs": _Broken(error)})
        found: type = over(theirs)
        return found


class _Broken:
    """In the place of a connector that can't be imported: says so to whoever wants that one."""

    def __init__(self, error: ImportError) -> None:
        self._error = error

    def __call__(self, *arguments: object) -> object:
        raise self._error
