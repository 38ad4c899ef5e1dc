"""The demo believes only webhooks that are signed as Standard Webhooks says."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator

import httpx2
import pytest
from standardwebhooks import Webhook

from rankwatch_service.demo.service import WebhookReceiver

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
BODY = json.dumps({"type": "incident.opened", "data": {"id": "inc_1", "transition": {"number": 1}}})


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    receiver = WebhookReceiver(SECRET)
    yield receiver
    receiver.close()


def signed(body: str, *, age_s: int = 0) -> dict[str, str]:
    from datetime import UTC, datetime

    stamp = int(time.time()) - age_s
    signature = Webhook(SECRET).sign("msg_1", datetime.fromtimestamp(stamp, UTC), body)
    return {"webhook-id": "msg_1", "webhook-timestamp": str(stamp), "webhook-signature": signature}


def post(receiver: WebhookReceiver, body: str, headers: dict[str, str]) -> None:
    assert httpx2.post(receiver.url, content=body, headers=headers).status_code == 204


def test_a_webhook_signed_by_the_reference_library_is_verified(receiver: WebhookReceiver) -> None:
    post(receiver, BODY, signed(BODY))
    (received,) = receiver.received
    assert received.verified
    assert (received.webhook_id, received.type, received.incident) == ("msg_1", "incident.opened", "inc_1")
    assert received.transition == 1


def test_one_of_several_signatures_is_enough(receiver: WebhookReceiver) -> None:
    headers = signed(BODY)
    headers["webhook-signature"] = "v1,bm9wZQ== " + headers["webhook-signature"]
    post(receiver, BODY, headers)
    assert receiver.received[0].verified


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        pytest.param(BODY.replace("inc_1", "inc_2"), signed(BODY), id="another body than the signed one"),
        pytest.param(BODY, signed(BODY) | {"webhook-id": "msg_2"}, id="another id than the signed one"),
        pytest.param(BODY, signed(BODY, age_s=3600), id="an hour old"),
        pytest.param(BODY, {}, id="no signature at all"),
        pytest.param(BODY, signed(BODY) | {"webhook-timestamp": "soon"}, id="a time that is no number"),
        pytest.param("no JSON", signed("no JSON"), id="a signed body that is no JSON"),
        pytest.param("[]", signed("[]"), id="a signed body of another shape"),
    ],
)
def test_a_webhook_is_not_verified_when_it_has(receiver: WebhookReceiver, body: str, headers: dict[str, str]) -> None:
    post(receiver, body, headers)
    assert not receiver.received[0].verified
