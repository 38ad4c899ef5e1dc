"""Publishes notifications to the receiver `kafka:` to the incidents topic.

A message is a CloudEvent in the binary mode of the Kafka binding: attributes are headers, the value is the body that
webhooks get. Its id is that of the notification, so consumers can drop duplicates.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

from rankwatch.kafka.producer import Message, Producer
from rankwatch.outcome import Accepted, Refused
from rankwatch_service.clock import Clock
from rankwatch_service.notify.sender import TryOutcome

ANSWER_WITHIN_S: Final = 15.0
"""The same limit as for a webhook."""
EVENT_TYPE: Final = "io.rankwatch."
"""Prefix of the message's type, such as `incident.opened`."""


class TopicSender:
    """Publishes messages for `kafka:` to the incidents topic."""

    def __init__(self, producer: Producer, topic: str, source: str, clock: Clock) -> None:
        """Send nothing yet.

        Args:
            producer: publishes to the brokers; the caller closes it.
            topic: name of the incidents topic.
            source: `ce_source` of the events, the service's public URL.
            clock: measures how long a try takes.
        """
        self._producer = producer
        self._topic = topic
        self._source = source
        self._clock = clock

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> TryOutcome:
        """See `MessageSender.send`."""
        del url, secret  # the topic and how to reach it are settings
        began_s = self._clock.monotonic_s()
        answer = asyncio.wrap_future(self._producer.submit(self._event(message_id, body)))
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                outcome = await answer
        except TimeoutError:
            error = f"no acknowledgement within {ANSWER_WITHIN_S:g} s"
        else:
            if isinstance(outcome, Accepted):
                return TryOutcome(200, "", self._clock.monotonic_s() - began_s)
            error = f"refused: {outcome.detail}" if isinstance(outcome, Refused) else outcome.reason
        return TryOutcome(None, error[:300], self._clock.monotonic_s() - began_s)

    def _event(self, message_id: str, body: bytes) -> Message:
        content = json.loads(body)
        headers = {
            "ce_specversion": "1.0",
            "ce_id": message_id,
            "ce_source": self._source,
            "ce_type": EVENT_TYPE + content["type"],
            "ce_time": content["timestamp"],
            "ce_subject": content["data"]["id"],
            "content-type": "application/json",
        }
        # Keyed by job, so that the messages of a job stay in one partition, in order.
        return Message(
            self._topic, content["data"]["job"], body, tuple((name, text.encode()) for name, text in headers.items())
        )
