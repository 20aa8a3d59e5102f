"""vLLM's table of connectors, with kvtier's in front of whatever is at one name.

A platform's plug-in (vllm-ascend's) puts its own connector there, and nobody says whose plug-in
vLLM calls first: so the table itself remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from kvtier.connectors.vllm.kv_connector import contract as kv_connector
from kvtier.connectors.vllm.offloading import contract

CONNECTOR_NAME = "OffloadingConnector"
"""Name of the connector in vLLM's table. Classes made here have it, too: under MultiConnector vLLM
files the statistics of a connector by the name of its class, and looks that up in the table."""
MULTI_NAME = "MultiConnector"

Loader = Callable[[], type]


class Connectors(dict[str, Loader]):
    """Loaders by name.

    What is set at ``name``, now or later, is loaded by ``InPlaceOf`` it, and vLLM's MultiConnector
    by ``Multi``.
    """

    def __init__(self, theirs: Mapping[str, Loader], name: str) -> None:
        super().__init__(theirs)
        self._ours: dict[str, type[InPlaceOf | Multi]] = {name: InPlaceOf, MULTI_NAME: Multi}
        for each in self._ours.keys() & self.keys():
            self[each] = self[each]

    def __setitem__(self, name: str, loader: Loader) -> None:
        ours = self._ours.get(name)
        if ours is not None and not isinstance(loader, ours):
            loader = ours(loader)
        super().__setitem__(name, loader)


class InPlaceOf:
    """Loads kvtier's connector in place of vLLM's.

    Makes vLLM's own for users who did not ask for kvtier. theirs: loads it.

    A vLLM that kvtier can't serve gets theirs alone. One whose platform has a connector for another
    version of vLLM gets ours over vLLM's own.
    """

    def __init__(self, theirs: Loader) -> None:
        self._theirs = theirs

    def __call__(self) -> type:
        return self._loaded

    @cached_property
    def _loaded(self) -> type:  # MultiConnector asks for a class with every statistics
        if contract.VLLM.differences():
            return self._theirs()
        from kvtier.connectors.vllm.offloading.connector import KvtierOffloadingConnector, over

        try:
            theirs = self._theirs()
        except ImportError as error:
            return type(CONNECTOR_NAME, (KvtierOffloadingConnector,), {"theirs": _Broken(error)})
        found: type = over(theirs)
        return found


class Multi:
    """Loads vLLM's MultiConnector, with the failure policy that kvtier inside it needs.

    theirs: loads vLLM's.
    """

    def __init__(self, theirs: Loader) -> None:
        self._theirs = theirs

    def __call__(self) -> type:
        return self._loaded

    @cached_property
    def _loaded(self) -> type:
        theirs = self._theirs()
        if not contract.VLLM.differences():
            from kvtier.connectors.vllm.offloading.multi import over_offloading

            return over_offloading(theirs)
        if not kv_connector.VLLM.differences():
            from kvtier.connectors.vllm.multi import over_multi

            return over_multi(theirs)
        return theirs


class _Broken:
    """In the place of a connector that can't be imported: says so to whoever wants that one."""

    def __init__(self, error: ImportError) -> None:
        self._error = error

    def __call__(self, *arguments: object) -> object:
        raise self._error
