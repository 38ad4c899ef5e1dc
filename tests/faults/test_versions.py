"""The wire format of this version, and what a service of it does with messages of a made-up next one."""

import msgspec
import pytest

from rankwatch import wire
from rankwatch_service.telemetry.envelope import BadBatchError, Reason
from rankwatch_service.telemetry.validate import validate
from tests.golden import make
from tests.support.values.batches import batch, progress, ranks, table

MSGPACK = "application/msgpack"
GOLDEN = msgspec.msgpack.decode(make.FILE.read_bytes(), type=dict[str, bytes])


def test_every_part_of_the_schema_is_in_the_golden_file():
    assert GOLDEN.keys() == make.messages().keys()


@pytest.mark.parametrize("name", make.messages())
def test_messages_are_encoded_to_the_bytes_of_the_golden_file_and_read_from_them(name):
    """After a change of the schema that is meant: `python -m tests.golden.make`."""
    sent = make.messages()[name]
    assert wire.encode(sent) == GOLDEN[name]
    if isinstance(sent, wire.View):
        assert msgspec.msgpack.decode(GOLDEN[name], type=wire.View) == sent
        return
    assert same(wire.decode_batch(GOLDEN[name]), sent)
    assert same(accepted(GOLDEN[name]), sent)


def accepted(body: bytes) -> wire.Batch:
    """What the log holds of a message that agents send."""
    return wire.decode_batch(validate(body, MSGPACK).body)


def same(read: wire.Batch, sent: wire.Batch) -> bool:
    return repr(read) == repr(sent)  # a NaN equals itself here


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
