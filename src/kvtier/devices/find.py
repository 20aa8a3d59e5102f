"""Choose a device back end by name."""

from __future__ import annotations

from kvtier.devices.base import Device
from kvtier.errors import DeviceError
from kvtier.plugins import load_plugin


def find_device(name: str) -> Device:
    """The back end for ``name``: "cpu", or what torch calls an accelerator ("cuda", "npu:0").

    A type without a back end of its own is served by the torch reference path.
    """
    kind = name.partition(":")[0]
    if kind == "cpu":
        made = load_plugin("devices", "cpu")()
    else:
        made = load_plugin("devices", "torch")(name)
    if not isinstance(made, Device):
        raise DeviceError(
            f"the plug-in for device {name!r} made a {type(made).__name__}, not a Device"
        )
    return made
