"""A rank's half: copies between its pages and host memory, as the scheduler's half orders them."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.connectors.vllm.kv_connector.messages import (
    NOTHING,
    PageJob,
    RankMessage,
    StepMessage,
)
from kvtier.connectors.vllm.shared.pages import EnginePages
from kvtier.connectors.vllm.shared.worker import TierWorker
from kvtier.devices import Direction


class RankHalf:
    """Carries out the scheduler's jobs and orders, on the thread that runs the model.

    stores: Whether this rank stores its KV. It does not if another one stores the same.
    """

    def __init__(self, worker: TierWorker, pages: EnginePages, stores: bool = True) -> None:
        self.worker = worker
        self._stores_kv = stores
        self._message = RankMessage(layouts=frozenset({pages.layout}))  # of what is to be reported
        self._jobs: dict[int, tuple[PageJob, Direction]] = {}
        self._stores: Sequence[PageJob] = ()
        self._finishing: set[str] = set()
        self._steps: list[int] = []
        self._failed: list[PageJob] = []
        self._computes = False
        self._owes_statistics = False

    def begin_step(self, message: StepMessage) -> None:
        """Begin loads and orders. Stores wait for ``end_step`` if the model is to run."""
        self.end_step()  # of the last step, if vLLM did not call wait_for_save
        self._computes = message.computes
        if message is NOTHING:
            return
        self.worker.note_weights(message.weights)
        if message.waits:
            self.worker.wait(set(self._jobs))
        for job in message.loads:
            self._submit(job, Direction.LOAD)
        for order in message.orders:
            self.worker.carry_out(order)
        self._finishing.update(message.finishing)
        if message.step is not None:
            self._steps.append(message.step)
        self._stores = message.stores
        if not message.computes:
            self.end_step()
            self.worker.rest()

    def end_step(self) -> None:
        """Begin the stores of the step, once its compute is queued on the device."""
        stores, self._stores = self._stores, ()
        for job in stores:
            if self._stores_kv:
                self._submit(job, Direction.STORE)
            else:
                self._message.ended[job.job_id] += 1

    def _submit(self, job: PageJob, direction: Direction) -> None:
        self._jobs[job.job_id] = job, direction
        self.worker.submit(job.job_id, job.pages, job.slots, direction)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose last store has ended, and the requests whose load has ended."""
        if not (self._jobs or self._finishing):
            return set(), set()
        loaded, message = set[str](), self._message
        for each in self.worker.take_ended():
            job, direction = self._jobs.pop(each.job_id)
            message.ended[each.job_id] += 1
            if direction is Direction.LOAD:
                loaded.add(job.request_id)
                if each.num_bytes:
                    message.load_bytes.append(each.num_bytes)
                    message.load_s += each.seconds
                if each.has_failed:
                    self._failed.append(job)
            else:
                message.store_bytes += each.num_bytes
                message.store_s += each.seconds
        stored: set[str] = set()
        if self._finishing:
            storing = {
                job.request_id
                for job, direction in self._jobs.values()
                if direction is Direction.STORE
            }
            storing.update(job.request_id for job in self._stores)
            stored = self._finishing - storing
            self._finishing &= storing
        return stored, loaded

    def asks_for_statistics(self) -> bool:
        """Return whether the scheduler's half should give its statistics in this step.

        Up to 0.29 vLLM takes these only beside those of a rank. ``LLM`` drops them in a step
        without answers, so they wait for a step that computes.
        """
        asks = self._computes and (self._owes_statistics or bool(self._message.ended))
        self._owes_statistics = self._owes_statistics and not asks
        return asks

    def take_failed(self) -> list[PageJob]:
        """Return the loads that failed."""
        failed, self._failed = self._failed, []
        return failed

    def take_message(self) -> RankMessage | None:
        """Return the message to the scheduler's half; None if there is nothing to report."""
        message = self._message
        has_own = message.ended or message.layouts
        if not (has_own or self._steps or self.worker.may_report()):
            return None
        message.report = self.worker.take_report(frozenset(self._steps))
        self._steps.clear()
        if not (message.report or has_own):
            return None
        self._message = RankMessage()
        self._owes_statistics |= not self._computes
        return message

    def shutdown(self) -> None:
        self.worker.shutdown()
