"""Agents and services of different versions: old telemetry is read for ever, newer telemetry is refused with a reason.

The golden files say what each released version sends (tests/golden/make.py); the frozen schema beside them is what a
service of that version reads.
"""

import re

import msgspec
import pytest
import zstandard

from rankwatch import wire
from rankwatch_service.simulate.faults import NonFinite
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.placement import RankPlacement
from rankwatch_service.telemetry.envelope import BadBatchError, Reason
from rankwatch_service.telemetry.validate import validate
from tests.golden import make, wire_v1
from tests.support.recordings.outcome import live_through, with_body
from tests.support.recordings.recording import telemetry
from tests.support.values.batches import batch, progress, ranks, table

MSGPACK = "application/msgpack"
ADDED_SINCE_VERSION_1 = (
    "host_devices",
    "slices",
    "device_type",
    "switch",
    "outside_s",
    "optimizers",
    "watched",
    "lockstep",
    "agent",
    "checkpoint_roots",
    "checkpoint_shards",
)
GOLDEN = sorted(make.FOLDER.glob("wire-v*.msgpack"))


def name_of(path) -> str:
    return path.stem.split("-", 2)[2]


def test_every_part_of_the_schema_has_its_golden_file():
    assert {name_of(path) for path in GOLDEN if path.name.startswith("wire-v1-")} == set(make.messages())


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_what_an_earlier_version_sent_is_still_understood(path):
    body = path.read_bytes()
    sent = make.messages()[name_of(path)]
    if isinstance(sent, wire.View):
        assert msgspec.msgpack.decode(body, type=wire.View) == sent
        return
    assert same(wire.decode_batch(body), sent)
    assert same(accepted(body), sent)


def accepted(body: bytes) -> wire.Batch:
    """What the log holds of a message that agents send."""
    return wire.decode_batch(validate(body, MSGPACK).body)


def same(read: wire.Batch, sent: wire.Batch) -> bool:
    return repr(read) == repr(sent)  # a NaN equals itself here


def without_newer(text: str) -> str:
    """What a message says, without the fields that were added since the first release."""
    return re.sub(rf", ({'|'.join(ADDED_SINCE_VERSION_1)})=(?:\(\)|[^,)]+)", "", text)


@pytest.mark.parametrize("name", make.messages())
def test_a_service_of_version_1_understands_what_agents_send_today(name):
    sent = make.messages()[name]
    released = wire_v1.View if isinstance(sent, wire.View) else wire_v1.Batch
    read = msgspec.msgpack.decode(wire.encode(sent), type=released)
    assert repr(read) == without_newer(repr(sent)).replace("wire.", "wire_v1.")


class NextProgress(wire.Progress, array_like=True, frozen=True):
    mood: str = "fine"


class NextBatch(wire.Batch, frozen=True):
    """What a later version might look like: new fields, added at the end."""

    progress: tuple[NextProgress, ...] = ()
    weather: dict[str, float] = msgspec.field(default_factory=dict)


def test_fields_that_this_version_does_not_know_are_passed_over():
    whole = batch(ranks=ranks(1), steps=table([1], [0], loss=[1.0]), progress=(progress(0, 1),))
    fields = {name: getattr(whole, name) for name in wire.Batch.__struct_fields__}
    fields["progress"] = tuple(NextProgress(*msgspec.structs.astuple(block), mood="new") for block in whole.progress)
    later = NextBatch(**fields, weather={"rain": 0.5})
    assert same(accepted(msgspec.msgpack.encode(later)), whole)


@pytest.mark.parametrize("missing", ["ranks", "steps", "progress", "devices", "events", "values"])
def test_a_field_that_a_later_version_has_given_up_is_simply_empty(missing):
    fields = msgspec.msgpack.decode(wire.encode(batch(ranks=ranks(1))))
    fields.pop(missing, None)  # what is empty is not sent either
    assert not getattr(accepted(msgspec.msgpack.encode(fields)), missing)


@pytest.mark.parametrize("shape", ["as today", "of another shape"])
def test_a_newer_schema_is_refused_by_its_number_whatever_its_shape(shape):
    fields = msgspec.msgpack.decode(wire.encode(batch(schema=wire.SCHEMA_VERSION + 1)))
    if shape == "of another shape":
        fields |= {"job": ["a", "list"], "seq": "text"}
    with pytest.raises(BadBatchError) as caught:
        validate(msgspec.msgpack.encode(fields), MSGPACK)
    assert caught.value.reason == Reason.VERSION
    assert str(wire.SCHEMA_VERSION + 1) in caught.value.detail


def test_a_rolling_upgrade_of_agents_before_services_costs_dead_letters_and_no_crash(tmp_path):
    """Some hosts' agents are ahead: theirs is kept as dead letters, everyone else is watched as before."""
    job = Job(world_size=8, steps=120, step_s=0.5, seed=9, placement=RankPlacement(ranks_per_host=4)).inject(
        NonFinite(1, 60)
    )
    entries, newer = [], 0
    for timed in telemetry("gpt", job):
        message = wire.decode_batch(timed.entry.value)
        if message.host == "host-1" and timed.time_s > 45:
            newer += 1
            message = msgspec.structs.replace(message, schema=wire.SCHEMA_VERSION + 1)
        entries.append(with_body(timed, wire.encode(message)))
    lived = live_through(tmp_path, entries)
    assert {reason for reason, _ in lived.refused} == {"version"}
    assert len(lived.refused) == newer > 10
    assert ("nonfinite", "rank:1", (1,), 60) in lived.outcome.of("gpt")
    lived.engine.dispose()


RECORDINGS = sorted(make.FOLDER.glob("recording-v*.msgpack.zst"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.partition(".")[0])
def test_what_an_earlier_version_recorded_leads_to_its_incidents(path, tmp_path):
    recorded = msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()), type=list[tuple[float, str, bytes]])
    sample = next(telemetry("gpt", Job(world_size=1, steps=1)))
    entries = [with_body(sample, body, time_s) for time_s, _, body in recorded]
    lived = live_through(tmp_path, entries)
    assert lived.refused == []
    found = {(kind, scope) for kind, scope, *_ in lived.outcome.of("gpt")}
    assert found == {("nonfinite", "rank:1"), ("straggler", "rank:3")}
    lived.engine.dispose()
