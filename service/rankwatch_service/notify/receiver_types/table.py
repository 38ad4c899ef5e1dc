"""The table of receiver types, and what is checked of a receiver before it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rankwatch_service.notify.receiver_types.alertmanager import ALERTMANAGER, ALERTMANAGER_WEBHOOK
from rankwatch_service.notify.receiver_types.base import ReceiverTraits, ReceiverType, Target, WebType
from rankwatch_service.notify.receiver_types.discord import DISCORD
from rankwatch_service.notify.receiver_types.email import EMAIL
from rankwatch_service.notify.receiver_types.google_chat import GOOGLE_CHAT
from rankwatch_service.notify.receiver_types.pagerduty import PAGERDUTY
from rankwatch_service.notify.receiver_types.slack import SLACK
from rankwatch_service.notify.receiver_types.teams import TEAMS
from rankwatch_service.notify.receiver_types.webhook import WEBHOOK

WEB_TYPES: Final[Mapping[ReceiverType, WebType]] = {
    ReceiverType.WEBHOOK: WEBHOOK,
    ReceiverType.ALERTMANAGER: ALERTMANAGER,
    ReceiverType.ALERTMANAGER_WEBHOOK: ALERTMANAGER_WEBHOOK,
    ReceiverType.PAGERDUTY: PAGERDUTY,
    ReceiverType.SLACK: SLACK,
    ReceiverType.TEAMS: TEAMS,
    ReceiverType.DISCORD: DISCORD,
    ReceiverType.GOOGLE_CHAT: GOOGLE_CHAT,
}
"""Types that are reached by a POST."""

RECEIVER_TYPES: Final[Mapping[ReceiverType, ReceiverTraits]] = {**WEB_TYPES, ReceiverType.EMAIL: EMAIL}
"""In the order in which people choose from them."""


def check_receiver(target: Target, secret: str) -> None:
    """Check what a type of receiver needs of its URL and its secret.

    Raises:
        ValueError: what is wrong, and what it should be.
    """
    RECEIVER_TYPES[target.type].check(target.url, secret)
