"""A receiver's type and URL as one text, which the database holds encrypted: pagerduty+https://events.pagerduty.com/…"""

from __future__ import annotations

from dataclasses import dataclass

from rankwatch_service.notify.receiver_types.base import ReceiverType


@dataclass(frozen=True, slots=True)
class Target:
    """The URL and the type of a receiver."""

    type: ReceiverType
    url: str

    def stored(self) -> str:
        """The text to store; of a webhook it is the URL alone."""
        return self.url if self.type is ReceiverType.WEBHOOK else f"{self.type}+{self.url}"

    @classmethod
    def read(cls, stored: str) -> Target:
        """The inverse of `stored`.

        >>> Target.read("slack+https://hooks.slack.com/services/T00").type
        <ReceiverType.SLACK: 'slack'>
        """
        name, plus, url = stored.partition("+")
        if plus and name in set(ReceiverType):
            return cls(ReceiverType(name), url)
        return cls(ReceiverType.WEBHOOK, stored)
