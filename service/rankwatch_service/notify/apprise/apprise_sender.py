"""Sends messages by Apprise, an optional extra, to the long tail of receivers: one try is one process."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from typing import Any, Final

from rankwatch_service.allow_list import AllowList
from rankwatch_service.clock import Clock
from rankwatch_service.notify.receiver_types.apprise import notification
from rankwatch_service.notify.receiver_types.base import ReceiverType
from rankwatch_service.notify.receiver_types.message import OutgoingMessage
from rankwatch_service.notify.receiver_types.target import Target
from rankwatch_service.notify.retry import retry_after_s
from rankwatch_service.notify.sender import MessageSender, TryOutcome

APPRISE_TIMEOUT_S: Final = 15.0
"""Time limit of one try, from the start of its process, which takes about a second, to its end."""

PROCESSES_MAX: Final = 4
"""Concurrent tries by Apprise, 75 MB each."""

NOT_INSTALLED: Final = "Apprise is not installed: pip install 'rankwatch[apprise]' where the roles api and notify run"


class AppriseError(Exception):
    """Apprise could not be asked; another try may succeed."""


async def refusal(url: str, private: AllowList) -> str:
    """Why an Apprise URL can never work, as far as can be said without sending; empty: nothing is wrong with it.

    Raises:
        AppriseError: Apprise did not say.
        TimeoutError: there was no answer within `APPRISE_TIMEOUT_S`.
    """
    if find_spec("apprise") is None:
        return NOT_INSTALLED
    async with asyncio.timeout(APPRISE_TIMEOUT_S):
        answered = await _asked(url, private, None)
    return str(answered["error"])


class AppriseSender:
    """Sends messages to receivers of the type apprise, and passes all others on."""

    def __init__(
        self, clock: Clock, private: AllowList, others: MessageSender, timeout_s: float = APPRISE_TIMEOUT_S
    ) -> None:
        """Send nothing yet.

        Args:
            clock: measures how long a try takes.
            private: loopback and private addresses that messages may go to.
            others: sends messages for all other receivers.
            timeout_s: time limit of one try.
        """
        self._clock = clock
        self._private = private
        self._others = others
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(PROCESSES_MAX)

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> TryOutcome:
        """See `MessageSender.send`."""
        target = Target.read(url)
        if target.type is not ReceiverType.APPRISE:
            return await self._others.send(url, secret, message_id, body)
        if find_spec("apprise") is None:
            return TryOutcome(None, f"cannot be sent: {NOT_INSTALLED}", 0.0)
        content = notification(OutgoingMessage(message_id, body))
        async with self._free:
            began_s = self._clock.monotonic_s()
            try:
                async with asyncio.timeout(self._timeout_s):
                    answered = await _asked(target.url, self._private, content)
            except TimeoutError:
                answered = {"error": f"no answer within {self._timeout_s:g} s"}
            except AppriseError as failed:
                answered = {"error": str(failed)}
            seconds = self._clock.monotonic_s() - began_s
        return TryOutcome(
            answered.get("status"),
            answered["error"],
            seconds,
            retry_after_s(answered.get("retry_after"), self._clock.unix_ns() / 1e9),
            is_final=answered.get("is_final", False),
        )


async def _asked(url: str, private: AllowList, content: dict[str, Any] | None) -> dict[str, Any]:
    """What `apprise_process.answer` returns. A process that outlives this call is killed.

    Raises:
        AppriseError: the process ended without an answer.
    """
    allow = ",".join([*private.names, *map(str, private.networks)])
    asked = json.dumps({"url": url, "allow": allow, "notification": content})
    # Its environment is empty: a proxy of ours would lead to addresses that were not checked. Secrets go by the pipe.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-B", "-m", "rankwatch_service.notify.apprise.apprise_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
    )
    try:
        output, _ = await process.communicate(asked.encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise AppriseError(f"Apprise ended with status {process.returncode}")
    answered: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answered
