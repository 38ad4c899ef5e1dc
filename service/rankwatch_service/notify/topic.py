"""Incidents for other systems: the receiver `kafka:` is our incidents topic, told like a webhook.

A message is a CloudEvent in the binary mode of the Kafka binding: what it is stands in headers, the value is the body
that webhooks get. Its id is that of the notification, so that a reader can leave out what comes twice.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

from rankwatch.kafka.producer import Message, Producer
from rankwatch.outcome import Accepted, Refused
from rankwatch_service.clock import Clock
from rankwatch_service.notify.notifier import Sends
from rankwatch_service.notify.receivers import TOPIC_URL
from rankwatch_service.notify.schedule import Outcome

ANSWER_WITHIN_S: Final = 15.0
"""As long as a webhook may take."""
EVENT_TYPE: Final = "io.rankwatch."
"""Before the message's own type, such as `incident.opened`."""


class TopicSender:
    """Sends to the incidents topic what goes there, and hands everything else on."""

    def __init__(self, producer: Producer, topic: str, source: str, clock: Clock, others: Sends) -> None:
        """`source`: whose events these are, the service's public URL."""
        self._producer = producer
        self._topic = topic
        self._source = source
        self._clock = clock
        self._others = others

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> Outcome:
        """Try once to deliver a message."""
        if url != TOPIC_URL:
            return await self._others.send(url, secret, message_id, body)
        began_s = self._clock.monotonic_s()
        answer = asyncio.wrap_future(self._producer.submit(self._event(message_id, body)))
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                outcome = await answer
        except TimeoutError:
            error = f"no acknowledgement within {ANSWER_WITHIN_S:g} s"
        else:
            if isinstance(outcome, Accepted):
                return Outcome(200, "", self._clock.monotonic_s() - began_s)
            error = f"refused: {outcome.detail}" if isinstance(outcome, Refused) else outcome.reason
        return Outcome(None, error[:300], self._clock.monotonic_s() - began_s)

    def _event(self, message_id: str, body: bytes) -> Message:
        told = json.loads(body)
        headers = {
            "ce_specversion": "1.0",
            "ce_id": message_id,
            "ce_source": self._source,
            "ce_type": EVENT_TYPE + told["type"],
            "ce_time": told["timestamp"],
            "ce_subject": told["data"]["id"],
            "content-type": "application/json",
        }
        return Message(
            self._topic, told["data"]["job"], body, tuple((name, text.encode()) for name, text in headers.items())
        )
