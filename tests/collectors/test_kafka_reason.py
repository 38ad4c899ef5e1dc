import logging

import pytest

from rankwatch.kafka.client import explained, listen

PASSWORD = (
    "Connection lost: [Error 58] SaslAuthenticationFailedError: Authentication failed: Invalid username or password"
)
CERTIFICATE = "Connection failed: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"
REFUSED = "Bootstrap connection to bootstrap-0 failed: KafkaConnectionError: 111 ECONNREFUSED (backoff 0.91 secs)"
CLOSED = "Bootstrap connection to bootstrap-0 failed: KafkaConnectionError: socket disconnected (backoff 0.70 secs)"
VAGUE = "Bootstrap bootstrap-0 not ready; waiting 0.91 secs"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([VAGUE], VAGUE),
        ([CLOSED, VAGUE], CLOSED),
        ([REFUSED, CLOSED, VAGUE], REFUSED),
        ([REFUSED, PASSWORD, VAGUE], PASSWORD),
        # A server that has other addresses too, at which nobody listens.
        ([PASSWORD, REFUSED, VAGUE, REFUSED], PASSWORD),
        ([CERTIFICATE, REFUSED], CERTIFICATE),
        ([CERTIFICATE, PASSWORD], PASSWORD),
    ],
)
def test_of_what_the_client_says_the_most_telling_is_kept_and_of_that_the_newest(said: list[str], told: str) -> None:
    listen()
    for line in said:
        logging.getLogger("kafka.net.manager").warning(line)
    assert explained(TimeoutError("Unable to bootstrap")) == f"Unable to bootstrap ({told})"


def test_a_new_client_begins_with_nothing_said() -> None:
    listen()
    logging.getLogger("kafka.net.manager").warning(PASSWORD)
    listen()
    assert explained(TimeoutError("away")) == "away"
