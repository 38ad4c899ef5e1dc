"""The incidents that the service's stream makes of batches, with time going on after the last one."""

from collections.abc import Sequence
from typing import Any

from rankwatch import wire
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.job.admission import BundleAccepted, CellQuota
from rankwatch_service.job.effects import Effects
from rankwatch_service.job.job import JobStream
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store.rows import incident_row
from tests.support.values.batches import bundle

TICK_S = 1.0


def judged(batches: Sequence[wire.Batch], after_s: float = 90.0) -> list[dict[str, Any]]:
    """The incidents of one job, oldest first, as they are `after_s` after the last batch; each was taken when sent."""
    effects = Effects()
    job = JobStream(batches[0].job, detectors, lambda job, incident: {}, SettingsInForce())
    now_s = batches[0].sent_unix_ns * 1e-9
    for batch in batches:
        while now_s + TICK_S <= batch.sent_unix_ns * 1e-9:
            now_s += TICK_S
            job.tick(now_s, 0.0, effects)
        assert job.admit(bundle(batch), CellQuota(batch.job, 0), now_s, effects) == BundleAccepted()
    for _ in range(int(after_s / TICK_S)):
        now_s += TICK_S
        job.tick(now_s, 0.0, effects)
    assert not effects.failures
    incidents: dict[str, dict[str, Any]] = {}
    for transition in effects.transitions:
        incidents[transition.incident.id] = incident_row(transition.incident)
    return list(incidents.values())
