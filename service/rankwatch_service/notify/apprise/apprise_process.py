"""One try by Apprise, in a process of its own (`python -m`) that reads JSON and writes JSON.

Apprise's plugins connect by themselves, follow what their URL says, and some read files that it names. An audit hook
sees every connection, file and program that Python code opens, whichever plugin does it, and refuses what a receiver
must not reach. A hook cannot be removed, and a plugin that hangs can only be killed: hence the process.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import ssl
import sys
import sysconfig
import threading
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Final

import requests
from apprise import Apprise, AppriseAsset, NotifyFormat
from apprise.common import PersistentStoreMode
from apprise.manager_plugins import NotificationManager

from rankwatch_service.allow_list import AllowList, allow_list
from rankwatch_service.notify.address import AddressError, check_address, check_port
from rankwatch_service.notify.receiver_types.apprise import scheme
from rankwatch_service.notify.receiver_types.base import read_status

MEMORY_BYTES_MAX: Final = 1024**3
"""Address space of the process. Plugins read whole replies, however large."""

DELIVERED: Final = 200
"""Status of what a plugin calls delivered, whatever its last reply was."""

FORBIDDEN: Final = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "pty.", "socket.sendto")
"""Beginnings of the audit events that are always refused: programs, and packets without a connection."""

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class AuditHook:
    """The audit hook: what a plugin may open."""

    def __init__(self, private: AllowList) -> None:
        """Refuse nothing yet.

        Args:
            private: loopback and private addresses that messages may go to.
        """
        self.refused: list[str] = []
        """Why connections were refused: plugins say only that they failed."""
        self._private = private
        self._asked = threading.local()
        paths = sysconfig.get_paths()
        found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._readable = tuple(f"{os.path.realpath(path)}/" for path in found)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Judge one audit event.

        Raises:
            PermissionError: it is refused; libraries take it as the failure of what they tried.
        """
        if event == "socket.getaddrinfo":
            self._asked.host = str(arguments[0])
        elif event == "socket.connect":
            self._check_connection(arguments[1])
        elif event == "open":
            self._check_file(arguments[0], arguments[2])
        elif event.startswith(FORBIDDEN):
            raise PermissionError(f"{event} is not allowed")

    def _check_connection(self, address: Any) -> None:
        # Of a socket of this machine the address is a path, and no IP address.
        host, port = address[:2] if isinstance(address, tuple) else ("", 0)
        try:
            check_address(getattr(self._asked, "host", ""), ip_address(host), self._private)
            check_port(port)
        except (AddressError, ValueError) as error:
            self.refused.append(str(error))
            raise PermissionError(str(error)) from error

    def _check_file(self, path: Any, flags: int) -> None:
        if isinstance(path, int):
            return
        # Without looking at the file: a path is compared as text after its links are followed.
        if flags & _WRITING or not os.path.realpath(os.fsdecode(path)).startswith(self._readable):
            raise PermissionError("a receiver must not open files")


class Replies:
    """The last HTTP reply that a plugin got, since plugins say only whether they succeeded."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.text = ""
        self.retry_after: str | None = None
        self.error = ""

    def watched(self, send: Callable[..., requests.Response]) -> Callable[..., requests.Response]:
        """A `requests.Session.send` that remembers what came back."""

        def watching(*arguments: Any, **options: Any) -> requests.Response:
            self.status = None
            try:
                response = send(*arguments, **options)
            except requests.RequestException as error:
                self.error = reason(error)
                raise
            self.status, self.text = response.status_code, response.text[:200]
            self.retry_after = response.headers.get("retry-after")
            return response

        return watching


def reason(error: BaseException) -> str:
    """The innermost cause in one short line; the errors of requests themselves would repeat the URL."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message}"
    known = isinstance(error, (OSError, socket.timeout)) and not isinstance(error, requests.RequestException)
    return f"{type(error).__name__}: {error}"[:300] if known else type(error).__name__


def plugin_of(url: str) -> Any:
    """The plugin of a URL.

    Raises:
        ValueError: there is none, or none that messages may be sent by; without the URL, which is a secret.
    """
    name = url.partition("://")[0]
    found = NotificationManager()
    if name not in found:
        raise ValueError(f"Apprise knows no {scheme(url)}")
    if "requests" not in vars(sys.modules[found[name].__module__]):
        raise ValueError(f"{scheme(url)} is not allowed: only plugins of Apprise that deliver by HTTP or HTTPS are")
    asset = AppriseAsset(
        app_id="rankwatch",
        app_desc="rankwatch",
        async_mode=False,
        http_redirects=False,
        pem_autogen=False,
        pgp_autogen=False,
        storage_mode=PersistentStoreMode.MEMORY,
    )
    plugin = Apprise.instantiate(url, asset=asset)
    if plugin is None:
        raise ValueError(f"Apprise cannot read the rest of {scheme(url)}: its form is in https://appriseit.com")
    if not plugin.verify_certificate:
        raise ValueError("verify=no is not allowed: certificates are always checked")
    return plugin


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Check a URL and, if there is a notification, send it.

    Args:
        asked: `url`; `allow`, the text of an allow-list; `notification`: title, body and notify_type, or None.

    Returns:
        `status` and `error` as in `TryOutcome`; `is_final`; `retry_after`, the header.
    """
    hook, replies = AuditHook(allow_list(asked["allow"])), Replies()
    sys.addaudithook(hook)
    outcome = {"status": None, "error": "", "is_final": False, "retry_after": None}
    try:
        plugin = plugin_of(asked["url"])
    except ValueError as error:
        return outcome | {"error": f"refused: {error}"}
    if asked["notification"] is None:
        return outcome
    requests.Session.send = replies.watched(requests.Session.send)
    sender = Apprise()
    sender.add(plugin)
    # As text: Apprise escapes it for plugins that send HTML or Markdown.
    if sender.notify(**asked["notification"], body_format=NotifyFormat.TEXT):
        return outcome | {"status": DELIVERED}
    if hook.refused:
        return outcome | {"error": f"refused: {hook.refused[0]}"}
    if replies.status is None:
        return outcome | {"error": replies.error or "the plugin sent nothing: it may open no file and no program"}
    reading = read_status(replies.status, replies.text)
    return {
        "status": replies.status,
        "error": reading.error or f"not taken: {replies.text}",
        "is_final": reading.is_final,
        "retry_after": replies.retry_after,
    }


def main() -> None:
    """Answer one request from standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    answered = answer(json.load(sys.stdin))
    sys.stdout.write(f"\n{json.dumps(answered)}")


if __name__ == "__main__":
    main()
