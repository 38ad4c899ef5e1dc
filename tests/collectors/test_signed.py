"""Signed messages: only the holder of the agent's secret can make them, each for one purpose."""

import msgspec
import pytest

from rankwatch.signed import HEAD_BYTES, MARK, Purpose, nonce_of, sign, split

AGENT, SECRET = "00112233445566aa", bytes(range(32))


def test_a_signed_message_names_its_agent_and_is_by_the_holder_of_its_secret():
    signed = split(sign(Purpose.BATCH, AGENT, SECRET, b"message"))
    assert (signed.agent, signed.message) == (AGENT, b"message")
    assert signed.is_by(SECRET, Purpose.BATCH)
    assert not signed.is_by(bytes(32), Purpose.BATCH)
    assert not signed.is_by(SECRET, Purpose.VIEW), "a batch is no view"


@pytest.mark.parametrize("at", [2, 9, 10, HEAD_BYTES - 1, HEAD_BYTES, -1])
def test_whatever_is_changed_is_no_longer_signed(at):
    body = bytearray(sign(Purpose.VIEW, AGENT, SECRET, b"a message"))
    body[at] ^= 1
    assert not split(bytes(body)).is_by(SECRET, Purpose.VIEW)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\xc1\x02" + bytes(60), b'{"schema": 1}', msgspec.msgpack.encode({"a": 1})]
)
def test_what_is_not_in_the_signed_form_is_left_to_others(body):
    assert split(body) is None


def test_no_msgpack_message_and_no_json_text_begins_like_a_signed_one():
    for value in (
        None,
        1,
        -1,
        2**40,
        1.5,
        "x",
        b"x" * 300,
        [1],
        {"a": 1},
        [0] * 100_000,
        {str(n): n for n in range(70_000)},
    ):
        assert msgspec.msgpack.encode(value)[0] != MARK


def test_each_message_has_a_nonce_of_its_own():
    first, second = (sign(Purpose.VIEW, AGENT, SECRET, message) for message in (b"1", b"2"))
    assert nonce_of(first) != nonce_of(second)
    assert len(bytes.fromhex(nonce_of(first))) == 16
