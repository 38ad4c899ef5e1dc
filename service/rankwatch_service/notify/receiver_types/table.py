"""The table of receiver types, and what is checked of a receiver before it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rankwatch_service.notify.receiver_types import email
from rankwatch_service.notify.receiver_types.alertmanager import ALERTMANAGER, ALERTMANAGER_WEBHOOK
from rankwatch_service.notify.receiver_types.base import ReceiverType, WebType
from rankwatch_service.notify.receiver_types.pagerduty import PAGERDUTY
from rankwatch_service.notify.receiver_types.slack import SLACK
from rankwatch_service.notify.receiver_types.target import Target
from rankwatch_service.notify.receiver_types.teams import TEAMS
from rankwatch_service.notify.receiver_types.webhook import WEBHOOK

WEB_TYPES: Final[Mapping[ReceiverType, WebType]] = {
    ReceiverType.WEBHOOK: WEBHOOK,
    ReceiverType.ALERTMANAGER: ALERTMANAGER,
    ReceiverType.ALERTMANAGER_WEBHOOK: ALERTMANAGER_WEBHOOK,
    ReceiverType.PAGERDUTY: PAGERDUTY,
    ReceiverType.SLACK: SLACK,
    ReceiverType.TEAMS: TEAMS,
}
"""All types but e-mail."""


def check_receiver(target: Target, secret: str) -> None:
    """Check what a type of receiver needs of its URL and its secret.

    Raises:
        ValueError: what is wrong, and what it should be.
    """
    check = email.check if target.type is ReceiverType.EMAIL else WEB_TYPES[target.type].check
    check(target.url, secret)
