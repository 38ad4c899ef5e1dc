"""The demo's second part, beside the first: a simulated job of four ranks, one of whose GPUs becomes too hot.

The counters of the GPU say that heat slows it down, its rank keeps the others waiting, and both are one incident with
that cause. Steps and counters are made by `rankwatch_service.simulate` and sent as an agent sends them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from rankwatch.trust import Trust
from rankwatch_service.clock import SystemClock
from rankwatch_service.demo.display import DemoView
from rankwatch_service.demo.script import SceneCheck
from rankwatch_service.demo.service import ServiceError, ServiceProcess
from rankwatch_service.simulate.faults import Throttle
from rankwatch_service.simulate.job import Job, RankPlacement
from rankwatch_service.simulate.live import HttpConnection, Pace, SendStatus, send_job

JOB: Final = "gpu-demo"
RANK: Final = 2
"""The rank whose device becomes hot."""
HOT_STEP: Final = 90
"""Steps before, from which it is learned what is usual: half a minute."""
SLOWNESS: Final = 1.25
STEP_S: Final = 0.36
REPORTED_LIMIT_S: Final = 160.0
"""Limit from the heat to the incident with its cause: throttling is reported after a whole minute of it."""
STEPS: Final = HOT_STEP + int(REPORTED_LIMIT_S / STEP_S)
LOOK_S: Final = 0.5


class ThrottledJob:
    """The second job, which trains from `start` on in a thread. Call `poll` often."""

    def __init__(self, service: ServiceProcess, view: DemoView) -> None:
        """Nothing is sent yet."""
        self._service = service
        self._view = view
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._sent = SendStatus()
        self._looked_s = 0.0
        self._hot_s: float | None = None
        self._straggler: dict[str, Any] | None = None
        self._incident: dict[str, Any] | None = None
        self.results: list[SceneCheck] = []
        """The checks of this part, once it is over."""

    def start(self) -> None:
        """Begin to train."""
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def done(self) -> bool:
        """Whether all that is waited for has happened, or will not happen any more."""
        return bool(self.results)

    def poll(self) -> None:
        """Look for incidents of the hot device.

        Raises:
            ServiceError: the service did not take the job.
        """
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_S or self.done:
            return
        self._looked_s = now_s
        if self._sent.failure:
            raise ServiceError(f"{JOB} was not sent: {self._sent.failure}")
        if self._hot_s is None:
            if (self._service.find(f"/api/v1/jobs/{JOB}").get("step") or 0) >= HOT_STEP:
                self._hot_s = now_s
                self._view.event(f"{JOB}, step {HOT_STEP}: GPU {RANK} is too hot and lowers its clock (rank {RANK})")
            return
        found = self._service.items("/api/v1/incidents", job=JOB)
        self._look(found)
        if self._incident is not None or now_s > self._hot_s + REPORTED_LIMIT_S:
            self.results = self._checks(found)

    def _train(self) -> None:
        placement = RankPlacement(ranks_per_host=4, launch_cpu=True, device_times=True)
        job = Job(4, STEPS, 1, step_s=STEP_S, placement=placement, late_values=True)

        def report(sent: SendStatus) -> None:
            self._sent = sent

        self._sent = send_job(
            job.inject(Throttle(RANK, HOT_STEP, SLOWNESS)),
            JOB,
            lambda: HttpConnection(self._service.url, self._service.token, Trust()),
            Pace(1.0, SystemClock()),
            self._ended.is_set,
            report,
        )

    def _look(self, incidents: list[dict[str, Any]]) -> None:
        slow = next((one for one in incidents if one["kind"] == "straggler"), None)
        if slow is not None and self._straggler is None:
            self._straggler = slow
            self._view.event(f"{JOB}, incident: {slow['summary']}")
        degraded = next((one for one in incidents if one["kind"] == "device_degraded" and one["consequences"]), None)
        if degraded is not None:
            self._incident = degraded
            self._view.event(f"{JOB}, its cause: {degraded['summary']}")

    def _checks(self, found: list[dict[str, Any]]) -> list[SceneCheck]:
        title, slow, whole = "a throttled GPU", self._straggler or {}, self._incident or {}
        others = [one["summary"] for one in found if one["ranks"] != [RANK]]
        after = (slow.get("detected_step") or 0) - HOT_STEP
        consequences = [one["kind"] for one in whole.get("consequences", [])]
        standing = [one for one in found if one["state"] != "resolved"]
        return [
            SceneCheck(f"{title}: rank {RANK} named, with cause device", _is_named(slow), f"after {after} steps"),
            SceneCheck(
                f"{title}: one incident, the straggler its consequence",
                consequences == ["straggler"] and len(standing) == 1,
                f"{len(standing)} open; consequences: {', '.join(consequences) or 'none'}",
            ),
            SceneCheck(f"{title}: nothing else opened", not others, "; ".join(others)),
        ]


def _is_named(slow: Mapping[str, Any]) -> bool:
    return list(slow.get("ranks", [])) == [RANK] and slow.get("cause") == "device"
