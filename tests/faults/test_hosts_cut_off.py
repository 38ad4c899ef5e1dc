"""What hosts could not send comes at once, and of some hosts later than of others: a hang is found, and its rank named.

The batches of one job of the fault trials go through a stream at the times at which a service would have received them.
"""

import pytest

from rankwatch import wire
from rankwatch_detectors.base import Kind
from rankwatch_service.log.base import Entry
from tests.support.recordings.outcome import live_through
from tests.support.recordings.recording import Timed
from tests.support.trials.fleet import sent

HOSTS = ("host-0", "host-1")


@pytest.mark.parametrize(
    ("outages", "why"),
    [
        ({"host-0": (0.7, 32.9), "host-1": (0.4, 39.6)}, "all steps before the hang are heard at once"),
        ({"host-0": (9.5, 16.3), "host-1": (9.5, 11.0)}, "the host of the hanging rank is heard last"),
        ({"host-0": (10.9, 18.4), "host-1": (10.8, 15.9)}, "its host's blocks are old, and not silent"),
        ({"host-0": (1.1, 23.1), "host-1": (1.2, 26.9)}, "the host of the hanging rank is heard first"),
    ],
)
def test_the_hanging_rank_is_named_whenever_its_host_is_heard(tmp_path, outages, why):
    entries = []
    for message in sent("small"):
        if message.batch.job == "gamma":
            begins_s, ends_s = outages[message.batch.host]
            time_s = ends_s if begins_s <= message.time_s < ends_s else message.time_s
            entries.append(Timed(time_s, Entry("gamma", wire.encode(message.batch))))
    entries.sort(key=lambda one: one.time_s)
    assert live_through(tmp_path, entries).outcome.of("gamma") == {(Kind.HANG, "job", (2,), 25)}, why
