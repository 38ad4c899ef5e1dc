"""What the provider of a cloud machine announces: its preemption or maintenance.

The provider's metadata service is asked only where `RANKWATCH_CLOUD` names the provider.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final

from rankwatch import wire
from rankwatch.agent.clock import AgentClock

ASK_EVERY_S: Final = 5.0
"""As AWS recommends; its shortest notice is two minutes."""
TELL_AGAIN_S: Final = 60.0
"""Interval at which an active notice is sent again; receivers drop it when it is no longer repeated."""
ANSWER_WITHIN_S: Final = 2.0
ANSWER_BYTES_MAX: Final = 65_536
LINK_LOCAL: Final = "http://169.254.169.254"
GOOGLE: Final = "http://metadata.google.internal"

Notice = dict[str, str]
"""`what`: preemption or maintenance; `action`, `at` and `detail` as the provider gives them, if it does."""

_log = logging.getLogger(__name__)


def on_aws(base: str = LINK_LOCAL) -> Notice | None:
    """A notice of EC2: a spot instance that is interrupted, or a scheduled event."""
    token = _ask(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    headers = {"X-aws-ec2-metadata-token": token or ""}
    spot = _json(_ask(f"{base}/latest/meta-data/spot/instance-action", headers))
    if isinstance(spot, dict):
        return {"what": "preemption", "action": str(spot.get("action", "")), "at": str(spot.get("time", ""))}
    for event in _list(_json(_ask(f"{base}/latest/meta-data/events/maintenance/scheduled", headers))):
        if event.get("State") == "active":
            code, description = str(event.get("Code", "")), str(event.get("Description", ""))
            return {"what": "maintenance", "action": code, "at": str(event.get("NotBefore", "")), "detail": description}
    return None


def on_gcp(base: str = GOOGLE) -> Notice | None:
    """A notice of Compute Engine: a preempted machine, or maintenance that moves or ends it."""
    headers = {"Metadata-Flavor": "Google"}
    if _ask(f"{base}/computeMetadata/v1/instance/preempted", headers) == "TRUE":
        return {"what": "preemption", "action": "terminate"}
    action = _ask(f"{base}/computeMetadata/v1/instance/maintenance-event", headers)
    return {"what": "maintenance", "action": action} if action and action != "NONE" else None


def on_azure(base: str = LINK_LOCAL) -> Notice | None:
    """A scheduled event of this Azure machine; Azure's service lists those of all machines of a set."""
    headers = {"Metadata": "true"}
    name = _ask(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    answer = _json(_ask(f"{base}/metadata/scheduledevents?api-version=2020-07-01", headers))
    events = _list(answer.get("Events") if isinstance(answer, dict) else None)
    mine = [event for event in events if name in (event.get("Resources") or ())]
    for event in sorted(mine, key=lambda event: event.get("EventType") not in _ENDING):
        action = str(event.get("EventType", ""))
        what = "preemption" if action in _ENDING else "maintenance"
        at, detail = str(event.get("NotBefore", "")), str(event.get("Description", ""))
        return {"what": what, "action": action, "at": at, "detail": detail}
    return None


_ENDING: Final = ("Preempt", "Terminate")
"""Events of Azure that end the machine."""

PROVIDERS: Final[Mapping[str, Callable[[], Notice | None]]] = {"aws": on_aws, "gcp": on_gcp, "azure": on_azure}


class CloudNotices(threading.Thread):
    """Asks for notices, and has events of those that appear or are withdrawn.

    Args:
        provider: one of `PROVIDERS`; with another one nothing is asked, and the log says so.
        clock: for the time of events.
        providers: what asks, by name.
    """

    def __init__(
        self, provider: str, clock: AgentClock, providers: Mapping[str, Callable[[], Notice | None]] = PROVIDERS
    ) -> None:
        super().__init__(name="cloud", daemon=True)
        self._look = providers.get(provider)
        if provider and self._look is None:
            _log.warning("RANKWATCH_CLOUD is %r, none of %s: no notices are read", provider, ", ".join(providers))
        self._clock = clock
        self._closed = threading.Event()
        self._notice: Notice | None = None
        self._sent_s = -TELL_AGAIN_S
        self._answers = True
        self._events: list[wire.Event] = []

    def take_events(self) -> list[wire.Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Stop polling."""
        self._closed.set()

    def run(self) -> None:
        """Poll until closed; return at once without a provider. Not for callers."""
        while self._look is not None and not self._closed.is_set():
            self.look()
            self._closed.wait(ASK_EVERY_S)

    def look(self) -> None:
        """Poll once. While the provider does not answer, its last answer holds."""
        assert self._look is not None
        try:
            notice = self._look()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._answers:
                _log.info("the metadata service does not answer: %s", error)
            self._answers = False
            return
        self._answers = True
        now_s = self._clock.monotonic_s()
        if notice != self._notice or (notice and now_s - self._sent_s >= TELL_AGAIN_S):
            self._notice, self._sent_s = notice, now_s
            self._events.append(wire.Event("host_notice", self._clock.unix_ns(), fields=dict(notice or {"what": ""})))


def _ask(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """The body of an answer; None where there is nothing at this address.

    Raises:
        OSError: there is no service, or it refuses.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - addresses of this file
    # Metadata is of this machine alone: a proxy would ask for its own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_WITHIN_S) as answer:
            body: bytes = answer.read(ANSWER_BYTES_MAX)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    return body.decode(errors="replace").strip()


def _json(text: str | None) -> Any:
    return None if not text else json.loads(text)


def _list(found: Any) -> list[dict[str, Any]]:
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
