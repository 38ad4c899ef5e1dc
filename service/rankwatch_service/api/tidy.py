"""What an api process removes from time to time. Every table that grows by itself and is not stream's has its bound."""

from __future__ import annotations

from typing import Final

from sqlalchemy import CursorResult, Engine, delete, func, select

from rankwatch_service.api.access import TokenKind
from rankwatch_service.api.once import KEEP_NS
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import AgentView, Command, Delivery, Feed, IdempotentReply, Outbox, Token

FEED_ROWS_MAX: Final = 50_000
"""What a browser can catch up with: a week of a busy installation, 15 MB."""

VIEW_NS: Final = 24 * 3_600 * 10**9
"""Views of attempts that ended longer ago are of no use."""

HISTORY_NS: Final = 90 * 86_400 * 10**9
"""Finished commands (with their orders) and settled notifications (with their deliveries)."""

EXPIRED_NS: Final = 7 * 86_400 * 10**9
"""Expired sessions and login tokens stay in the list of tokens for so long."""


def tidy(engine: Engine, now_unix_ns: int) -> None:
    """Remove what is past its time; a short transaction for each table, so that nobody waits long."""
    with read(engine) as connection:
        newest = connection.scalar(select(func.max(Feed.id))) or 0
    short_lived = Token.kind.in_((TokenKind.SESSION, TokenKind.LOGIN))
    settled = (Outbox.state != "waiting") & (Outbox.created_unix_ns < now_unix_ns - HISTORY_NS)
    for statement in (
        delete(Feed).where(Feed.id <= newest - FEED_ROWS_MAX),
        delete(IdempotentReply).where(IdempotentReply.at_unix_ns < now_unix_ns - KEEP_NS),
        delete(AgentView).where(AgentView.at_unix_ns < now_unix_ns - VIEW_NS),
        delete(Token).where(short_lived, Token.expires_unix_ns < now_unix_ns - EXPIRED_NS),
        delete(Command).where(Command.finished_unix_ns < now_unix_ns - HISTORY_NS),
        delete(Delivery).where(Delivery.outbox_id.in_(select(Outbox.id).where(settled))),
        delete(Outbox).where(settled),
    ):
        with write(engine) as connection:
            result: CursorResult[tuple[()]] = connection.execute(statement)
            result.close()
