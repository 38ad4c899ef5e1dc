"""Sends messages to e-mail receivers by the mail server of the service: one try is one SMTP session."""

from __future__ import annotations

import asyncio
import contextlib
import smtplib
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from rankwatch.trust import is_loopback
from rankwatch_service.clock import Clock
from rankwatch_service.notify.receiver_types.base import Target
from rankwatch_service.notify.receiver_types.email import Email, address, email
from rankwatch_service.notify.receiver_types.message import OutgoingMessage
from rankwatch_service.notify.sender import TryOutcome
from rankwatch_service.settings import MailServer

SESSION_TIMEOUT_S: Final = 15.0
"""Time limit of one try, from the connection to the mail server's last reply."""

HELLO: Final = "localhost"
"""How we introduce ourselves. Looking our own name up could take longer than the whole session."""

ACCEPTED: Final = 250
"""Reply code of a mail server that has taken an e-mail."""

SESSIONS_MAX: Final = 4
"""Concurrent sessions, each in a thread. All go to one server, and many servers allow few from one host."""


class EmailSender:
    """Sends messages to `mailto:` receivers. Use as an async context manager."""

    def __init__(
        self,
        server: MailServer | None,
        clock: Clock,
        timeout_s: float = SESSION_TIMEOUT_S,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        """Send nothing yet.

        Args:
            server: of the service; None: there is none, and e-mails fail until there is.
            clock: measures how long a try takes.
            timeout_s: time limit of one try.
            trusted: checks the server's certificate; None: the system's authorities.
        """
        self._server = server
        self._clock = clock
        self._timeout_s = timeout_s
        self._trusted = trusted or ssl.create_default_context()
        self._threads = ThreadPoolExecutor(SESSIONS_MAX, "smtp")
        self._free = asyncio.Semaphore(SESSIONS_MAX)

    async def __aenter__(self) -> EmailSender:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> TryOutcome:
        """See `MessageSender.send`."""
        del secret  # the login is the mail server's
        if self._server is None:
            return TryOutcome(None, "cannot be sent: the service has no mail server; set RANKWATCH_SMTP_URL", 0.0)
        content = email(OutgoingMessage(message_id, body), address(Target.read(url).url), self._server.sender)
        async with self._free:
            began_s = self._clock.monotonic_s()
            status, error, is_final = await self._session(
                _Session(self._server, self._trusted, self._timeout_s), content
            )
        return TryOutcome(status, error, self._clock.monotonic_s() - began_s, is_final=is_final)

    async def _session(self, session: _Session, content: Email) -> tuple[int | None, str, bool]:
        """Status, error, and whether it is final."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, session.deliver, content)
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(running)
        except TimeoutError:
            session.cut()
            # The place of a session is free when its thread has ended, which it does at once if it reads or writes.
            for ended in (await asyncio.wait({running}, timeout=self._timeout_s))[0]:
                ended.exception()
            return None, f"no answer within {self._timeout_s:g} s", False
        except smtplib.SMTPRecipientsRefused as refused:
            code, text = refused.recipients[content.to]
            return _refused(code, text, concerns_message=True)
        except smtplib.SMTPResponseException as refused:
            concerns_message = isinstance(refused, smtplib.SMTPDataError | smtplib.SMTPSenderRefused)
            return _refused(refused.smtp_code, refused.smtp_error, concerns_message=concerns_message)
        except (OSError, smtplib.SMTPException) as failed:
            return None, f"{type(failed).__name__}: {failed}"[:300], False
        return ACCEPTED, "", False


class _Session:
    """One SMTP session in a thread, which another thread can cut."""

    def __init__(self, server: MailServer, trusted: ssl.SSLContext, timeout_s: float) -> None:
        self._server = server
        self._trusted = trusted
        self._timeout_s = timeout_s
        self.smtp: smtplib.SMTP | None = None

    def deliver(self, content: Email) -> None:
        """Deliver one e-mail. Blocking.

        Raises:
            smtplib.SMTPException: it was refused.
            OSError: there was no session.
        """
        server = self._server
        # The limit of the whole try is the caller's, and always comes first.
        within_s = 2 * self._timeout_s
        smtp: smtplib.SMTP = (
            _TlsClient(self, server, within_s, self._trusted) if server.is_tls else _PlainClient(self, server, within_s)
        )
        try:
            smtp.ehlo_or_helo_if_needed()
            if not server.is_tls and (smtp.has_extn("starttls") or not is_loopback(server.host)):
                smtp.starttls(context=self._trusted)
                smtp.ehlo()
            if server.username:
                smtp.login(server.username, server.password)
            smtp.sendmail(content.sender, [content.to], content.content)
            # It is delivered now, whatever becomes of the session.
            with contextlib.suppress(OSError, smtplib.SMTPException):
                smtp.quit()
        finally:
            smtp.close()

    def cut(self) -> None:
        """End the session from another thread: its next read or write fails."""
        open_socket = self.smtp.sock if self.smtp else None
        if open_socket is not None:
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)


class _PlainClient(smtplib.SMTP):
    """Tells its session of itself before it connects, so that the session can be cut from then on."""

    def __init__(self, session: _Session, server: MailServer, timeout_s: float) -> None:
        session.smtp = self
        super().__init__(server.host, server.port, HELLO, timeout_s)


class _TlsClient(smtplib.SMTP_SSL):
    """The same over TLS."""

    def __init__(self, session: _Session, server: MailServer, timeout_s: float, trusted: ssl.SSLContext) -> None:
        session.smtp = self
        super().__init__(server.host, server.port, HELLO, timeout=timeout_s, context=trusted)


def _refused(code: int, text: bytes | str, *, concerns_message: bool) -> tuple[int, str, bool]:
    reason = text.decode(errors="replace") if isinstance(text, bytes) else text
    return code, f"refused with {code}: {reason}"[:300], concerns_message and 500 <= code < 600
