import contextlib
import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwatch import wire
from rankwatch_service.telemetry.columns import ROWS_MAX, records
from rankwatch_service.telemetry.envelope import WORLD_SIZE_MAX, BadBatchError, Reason
from rankwatch_service.telemetry.validate import validate
from tests.support.values.batches import batch, column, progress, ranks, table

MSGPACK = "application/msgpack"
PLAIN = {
    "schema": 1,
    "job": "gpt",
    "attempt": "l.0",
    "host": "h",
    "boot": "b",
    "seq": 0,
    "sent_unix_ns": 0,
    "steps": {"rows": 2, "columns": {"step": [7, 7], "rank": [0, 1], "loss": [1.5, "NaN"], "busy_s": [None, 2]}},
}


def refusal(message: wire.Batch | bytes, content_type: str = MSGPACK) -> Reason:
    body = message if isinstance(message, bytes) else wire.encode(message)
    with pytest.raises(BadBatchError) as caught:
        validate(body, content_type)
    assert caught.value.detail
    return caught.value.reason


def accepted(body: bytes, content_type: str) -> wire.Batch:
    return wire.decode_batch(validate(body, content_type).body)


def test_a_sound_batch_comes_back_as_it_was_sent():
    sent = batch(
        ranks=ranks(2),
        steps=table([1, 1], [0, 1], loss=[1.0, math.nan], exact={"fingerprint": [2**62 + 1, None]}),
        values=table([1], [0], grad_norm=[math.inf]),
        progress=(progress(0, 1),),
        events=(wire.Event("note", 5, 0, 1, {"text": "hello"}),),
    )
    found = validate(wire.encode(sent), MSGPACK)
    assert (found.job, found.body) == ("gpt", wire.encode(sent))


def test_columns_keep_nan_absence_and_exact_bits():
    found = records(table([1, 1], [0, 1], loss=[None, math.nan], exact={"fingerprint": [2**62 + 1, None]}))
    assert found.names == ("loss",)
    assert found.present is not None
    assert found.present.tolist() == [[False, True]]
    assert math.isnan(found.values[0, 1])
    assert found.exact["fingerprint"].values[0] == 2**62 + 1
    assert found.exact["fingerprint"].present.tolist() == [True, False]


def test_narrow_integer_columns_are_read_from_their_base():
    steps = wire.Table(
        2,
        {
            "step": wire.Column("u1", bytes([0, 1]), base=1_000_000),
            "rank": column([0, 0], "u2"),
            "tokens": wire.Column("u2", np.array([1, 2], "<u2").tobytes(), base=100),
        },
    )
    found = records(steps)
    assert found.step.tolist() == [1_000_000, 1_000_001]
    assert found.values.tolist() == [[101.0, 102.0]]


def narrow_fingerprints(base: int) -> wire.Table:
    fingerprints = wire.Column("u1", bytes([0, 1]), base=base)
    return wire.Table(2, {"step": column([7, 7], "i8"), "rank": column([0, 1], "u1"), "fingerprint": fingerprints})


@pytest.mark.parametrize("base", [2**63 - 2, -(2**63), 8_008_666_735_422_129_833])
def test_a_fingerprint_may_use_all_64_bits(base):
    assert records(narrow_fingerprints(base)).exact["fingerprint"].values.tolist() == [base, base + 1]


def test_a_value_that_its_base_carries_beyond_64_bits_is_refused():
    assert refusal(batch(steps=narrow_fingerprints(2**63 - 1))) == Reason.COLUMNS


def test_plain_json_says_the_same_as_msgpack():
    read = accepted(json.dumps(PLAIN).encode(), "application/json; charset=utf-8")
    found = records(read.steps)
    assert found.step.tolist() == [7, 7]
    assert found.values[found.names.index("busy_s")].tolist() == [0.0, 2.0]
    assert found.present[found.names.index("busy_s")].tolist() == [False, True]
    assert math.isnan(found.values[found.names.index("loss"), 1])
    assert validate(wire.encode(read), MSGPACK).job == "gpt"


def test_plain_json_carries_progress_and_devices_as_objects():
    body = PLAIN | {
        "progress": [{"rank": 0, "step": 7, "phase": "forward", "phase_age_s": 0.5, "step_age_s": 1}],
        "devices": [{"device_uuid": "GPU-0", "time_unix_ns": 1, "power_w": 300}],
        "host_devices": [{"kind": "port", "name": "eth0", "time_unix_ns": 1, "counters": {"link_up": 1}}],
    }
    read = accepted(json.dumps(body).encode(), "application/json")
    assert read.progress == (wire.Progress(0, 7, "forward", 0.5, 1.0),)
    assert read.devices[0].power_w == 300
    assert read.host_devices[0].counters == {"link_up": 1.0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, Reason.VERSION),
        ({"schema": 0}, Reason.VERSION),
        ({"job": ""}, Reason.NAME),
        ({"job": "*"}, Reason.NAME),
        ({"job": "a/b"}, Reason.NAME),
        ({"job": "a\x00b"}, Reason.NAME),
        ({"job": "x" * 201}, Reason.NAME),
        ({"job": ".."}, Reason.NAME),
        ({"job": "gpt\u200b"}, Reason.NAME),
        ({"job": "\u202egpt"}, Reason.NAME),
        ({"host": " h"}, Reason.NAME),
        ({"attempt": "launch"}, Reason.NAME),
        ({"attempt": "l.-1"}, Reason.NAME),
        ({"seq": -1}, Reason.RANGE),
        ({"sent_unix_ns": 2**63}, Reason.RANGE),
        ({"ranks": (wire.RankInfo(0, 0),)}, Reason.RANGE),
        ({"ranks": (wire.RankInfo(4, 4),)}, Reason.RANGE),
        ({"ranks": (wire.RankInfo(-1, 4),)}, Reason.RANGE),
        ({"ranks": (wire.RankInfo(0, WORLD_SIZE_MAX + 1),)}, Reason.RANGE),
        ({"ranks": (wire.RankInfo(0, 4), wire.RankInfo(1, 8))}, Reason.RANGE),
        ({"ranks": (wire.RankInfo(0, 4, dp=-1),)}, Reason.RANGE),
        ({"progress": (progress(-1, 0),)}, Reason.RANGE),
        ({"progress": (progress(0, -2),)}, Reason.RANGE),
        ({"progress": (progress(0, 0, phase_age_s=math.nan),)}, Reason.RANGE),
        ({"progress": (progress(0, 0, step_age_s=-1.0),)}, Reason.RANGE),
        ({"events": (wire.Event("note", 0, rank=-1),)}, Reason.RANGE),
        ({"events": (wire.Event("note", 0, fields={"x": b"bytes"}),)}, Reason.MALFORMED),
        ({"events": (wire.Event("note", 0, fields={"x": [[[[[1]]]]]}),)}, Reason.MALFORMED),
        ({"events": (wire.Event("note", 0, fields={"x": 2**64 - 1}),)}, Reason.MALFORMED),
        ({"steps": table([-1], [0])}, Reason.RANGE),
        ({"steps": table([2**60], [0])}, Reason.RANGE),
        ({"steps": table([0], [WORLD_SIZE_MAX])}, Reason.RANGE),
        ({"steps": wire.Table(1, {"step": column([0], "i8"), "rank": column([-1], "i8")})}, Reason.RANGE),
        ({"steps": wire.Table(1, {"step": column([0], "i8")})}, Reason.COLUMNS),
        ({"steps": wire.Table(1, {"step": column([0.5]), "rank": column([0], "u1")})}, Reason.COLUMNS),
        ({"steps": wire.Table(1, {"step": column([None], "i8"), "rank": column([0], "u1")})}, Reason.COLUMNS),
        ({"steps": table([0], [0], loss=[1.0, 2.0])}, Reason.COLUMNS),
        ({"steps": wire.Table(10**12, {})}, Reason.COLUMNS),
        ({"steps": wire.Table(-1, {})}, Reason.COLUMNS),
        ({"steps": wire.Table(ROWS_MAX + 1, {})}, Reason.COLUMNS),
        ({"steps": table([0], [0], **{f"m{n}": [1.0] for n in range(161)})}, Reason.COLUMNS),
        ({"steps": table([0], [0], **{"x" * 65: [1.0]})}, Reason.COLUMNS),
        ({"steps": table([0], [0], **{"a\nb": [1.0]})}, Reason.COLUMNS),
        ({"values": table([0], [0], fingerprint=[1.5])}, Reason.COLUMNS),
        ({"values": table([0], [0], exact={"kind": [3]})}, Reason.RANGE),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(change, reason):
    assert refusal(batch(**change)) == reason


@pytest.mark.parametrize("dtype", ["f2", "O", "i4", "", ">f8"])
def test_an_unknown_dtype_is_refused(dtype):
    bad = wire.Table(1, {"step": column([0], "i8"), "rank": column([0], "u1"), "x": wire.Column(dtype, bytes(8))})
    assert refusal(batch(steps=bad)) == Reason.COLUMNS


def test_a_mask_of_the_wrong_length_is_refused():
    bad = wire.Table(
        1, {"step": column([0], "i8"), "rank": column([0], "u1"), "x": wire.Column("u1", b"0", 0, b"\xff\xff")}
    )
    assert refusal(batch(steps=bad)) == Reason.COLUMNS


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_a_truncated_body_is_malformed(cut):
    assert refusal(wire.encode(batch(steps=table([1], [0])))[:cut]) == Reason.MALFORMED


def test_an_oversized_body_is_refused_before_it_is_read():
    assert refusal(bytes(wire.BATCH_BYTES_MAX + 1)) == Reason.TOO_LARGE


def test_a_json_body_that_the_log_could_not_hold_as_msgpack_is_refused_at_once():
    columns = {name: [1] * 65_000 for name in ("step", "rank", *(f"m{number}" for number in range(16)))}
    body = json.dumps(PLAIN | {"steps": {"columns": columns}}, separators=(",", ":")).encode()
    assert len(body) < wire.BATCH_BYTES_MAX
    assert refusal(body, "application/json") == Reason.TOO_LARGE


def test_a_newer_version_of_another_shape_is_reported_as_such():
    assert refusal(msgspec.msgpack.encode({"schema": 9, "work": ["x"]})) == Reason.VERSION
    assert refusal(b'{"schema": 9}', "application/json") == Reason.VERSION


def test_another_content_type_is_refused():
    assert refusal(b"{}", "text/csv") == Reason.CONTENT_TYPE


@pytest.mark.parametrize(
    "cells", [["seven"], [True, "x"], [10**30], ["nan"], [[1]]], ids=["word", "mixed", "huge", "case", "nested"]
)
def test_a_json_list_may_hold_numbers_null_and_three_words_only(cells):
    body = PLAIN | {"steps": {"columns": {"step": [7], "rank": [0], "x": cells}}}
    assert refusal(json.dumps(body).encode(), "application/json") in {Reason.COLUMNS, Reason.MALFORMED}


@pytest.mark.parametrize("name", ["host", "device_uuid", "device_type", "switch"])
def test_a_rank_has_names_of_a_bounded_length(name):
    info = wire.RankInfo(0, 1, **{name: "x" * 200})
    assert accepted(wire.encode(batch(ranks=(info,))), MSGPACK).ranks == (info,)
    assert refusal(batch(ranks=(wire.RankInfo(0, 1, **{name: "x" * 201}),))) == Reason.NAME


def test_a_bomb_of_nested_json_is_malformed():
    body = json.dumps(PLAIN).encode()[:-1] + b',"events":' + b"[" * 100_000
    assert refusal(body, "application/json") == Reason.MALFORMED


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_body_is_accepted_or_refused_but_never_anything_else(data):
    body = bytearray(
        wire.encode(
            batch(
                ranks=ranks(2),
                steps=table([1, 1], [0, 1], loss=[1.0, None], exact={"fingerprint": [5, 6]}),
                progress=(progress(0, 1),),
                events=(wire.Event("note", 5, 0, 1, {"text": "hello"}),),
            )
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadBatchError):
        validate(bytes(body), MSGPACK)
