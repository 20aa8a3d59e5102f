"""The compute stream of an engine: torch's, queried each time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kvtier.core.errors import DeviceError  # noqa: E402
from kvtier.devices.compute import torch_compute  # noqa: E402
from tests.devices.drivers import make_device  # noqa: E402
from tests.kit.fakes.fake import Fake  # noqa: E402


class Stream:
    """A stream of torch_npu: reading its handle empties the queue in front of the driver."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.num_drains = 0

    @property
    def npu_stream(self) -> int:
        self.num_drains += 1
        return self._handle


def test_handle_is_read_before_every_use_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake("cann91")
    stream = Stream(fake.compute_stream())
    module = SimpleNamespace(is_available=lambda: True, current_stream=lambda device: stream)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = make_device(fake, 0, torch_compute("cpu", "npu_stream"))
    assert stream.num_drains == 0
    for count in range(1, 4):
        fence = device.fence()
        assert stream.num_drains == 2 * count - 1
        fence.hold_compute()
        assert stream.num_drains == 2 * count
        fence.wait()
    assert fake.violations == []


def test_torch_that_cant_compute_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch can")
    with pytest.raises(DeviceError, match="can't compute on cuda:0"):
        torch_compute("cuda:0", "cuda_stream")
