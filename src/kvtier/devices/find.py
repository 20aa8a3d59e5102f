"""Choose a device back end by name, from those available on the machine."""

from __future__ import annotations

import logging

from kvtier.core.errors import ConfigError, DeviceError
from kvtier.core.system.plugins import known_plugins, load_plugin
from kvtier.devices.base import Device, Finding

logger = logging.getLogger(__name__)

BACK_ENDS = {
    "cpu": ("cpu",),
    "cuda": ("cuda", "hip", "torch"),
    "npu": ("ascend", "torch"),
}
"""Plug-ins to try, best first, by torch's kind of device. Other kinds use the plug-in of the same
name, if any, then torch's own copies."""


def find_device(name: str) -> Device:
    """Return the back end for ``name``: "cpu", or torch's name of an accelerator ("cuda", "npu:0").

    Raises ``DeviceError`` that says for each back end why it cannot be used.
    """
    device, misses = look_for(name)
    if device is None:
        reasons = "; ".join(f"{miss.topic}: {miss.note}" for miss in misses)
        raise DeviceError(f"no device {name!r} here ({reasons}); use --device cpu")
    for miss in misses:
        logger.info("device=%s is not served by %s: %s", name, miss.topic, miss.note)
    return device


def look_for(name: str) -> tuple[Device | None, list[Finding]]:
    """Return the first back end for ``name`` that works, and why those before it do not."""
    misses: list[Finding] = []
    kind = name.partition(":")[0]
    own = (kind,) if kind in known_plugins("devices") else ()
    for plugin in BACK_ENDS.get(kind, (*own, "torch")):
        try:
            make = load_plugin("devices", plugin)
            made = make() if kind == "cpu" else make(name)
        except (ConfigError, DeviceError, ImportError, OSError) as error:
            misses.append(Finding(plugin, "no", str(error)))
            continue
        if not isinstance(made, Device):
            raise DeviceError(
                f"the plug-in {plugin!r} for device {name!r} made a {type(made).__name__}, "
                "not a Device"
            )
        return made, misses
    return None, misses
