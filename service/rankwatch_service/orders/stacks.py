"""Requests for the stacks of a hang as commands: how one ends.

Such a command has no order, because it does not hold the ranks: agents are asked while it is `sent`. It is applied as
soon as all of its ranks have answered; one that expires before is applied if any rank has. Pure.
"""

from __future__ import annotations

from rankwatch_service.incidents.hang_evidence import StacksReceived
from rankwatch_service.orders.order import CommandOutcome


def outcome(received: StacksReceived) -> CommandOutcome:
    """How far the command has come; `sent` while answers may still come."""
    state = "applied" if received.count >= received.asked else "sent"
    return CommandOutcome(state, f"{received.count:,} of {received.asked:,} ranks answered")


def outcome_after(result: str | None) -> CommandOutcome:
    """How a command ends that has expired.

    Args:
        result: of its row, which says how many ranks have answered, if any has.
    """
    return CommandOutcome("applied", result) if result else CommandOutcome("expired", "no rank answered in time")
