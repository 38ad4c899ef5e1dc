"""Signatures, verified by the reference library."""

import json
import time

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from rankwatch_service.notify.signature import new_secret, signed_headers, signing_key

BODY = json.dumps({"type": "incident.opened", "data": {"job": "größe"}}).encode()


def test_the_reference_library_accepts_a_signed_message():
    secret = new_secret()
    headers = signed_headers(secret, "msg_1", int(time.time()), BODY)
    assert Webhook(secret).verify(BODY, headers) == json.loads(BODY)


@pytest.mark.parametrize("change", ["body", "id", "timestamp", "secret"])
def test_the_reference_library_refuses_a_message_that_was_changed(change):
    secret, body, now_s = new_secret(), BODY, int(time.time())
    headers = signed_headers(secret, "msg_1", now_s, body)
    if change == "body":
        body += b" "
    elif change == "id":
        headers["webhook-id"] = "msg_2"
    elif change == "timestamp":
        headers["webhook-timestamp"] = str(now_s + 1)
    else:
        secret = new_secret()
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(body, headers)


def test_while_secrets_change_both_the_old_and_the_new_one_verify():
    old, new = new_secret(), new_secret()
    headers = signed_headers(f"{old} {new}", "msg_1", int(time.time()), BODY)
    for secret in (old, new):
        Webhook(secret).verify(BODY, headers)


@pytest.mark.parametrize("secret", ["", "abc", "whsec_", "whsec_!!!", "whsec_c2hvcnQ=", "whsec_" + "A" * 92])
def test_a_malformed_secret_is_refused_with_a_reason(secret):
    with pytest.raises(ValueError, match="a receiver's secret"):
        signing_key(secret)
