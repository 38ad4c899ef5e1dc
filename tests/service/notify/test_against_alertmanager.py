"""Three minutes of incidents, given to our groups and to a real Alertmanager: both notify of the same."""

import json
import time
import tomllib
from datetime import UTC, datetime

import httpx2
import pytest

from rankwatch_detectors.scope import IncidentScope
from rankwatch_service.labels.incident_labels import incident_labels
from rankwatch_service.policy.control_records import JobProject
from rankwatch_service.policy.notification import incident_message
from rankwatch_service.policy.routing import mutes
from rankwatch_service.routing.grouping import IncidentGroups
from rankwatch_service.routing.written_routes import read_routes
from tests.support.service.alertmanager import needs_alertmanager, running_alertmanager
from tests.support.service.webhook_receiver import webhook_receiver
from tests.support.trials.selection import long_trial
from tests.support.values.incidents import silence, transition

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), needs_alertmanager, long_trial]
"""The story takes three minutes, after up to one until its second of the minute."""

ROUTES = """
[route]
receiver = "all"
group_by = ["job"]
group_wait = "4s"
group_interval = "10s"
repeat_interval = "25s"

[[route.routes]]
matchers = ['severity="critical"']
receiver = "pager"

[[route.routes]]
matchers = ['project="night"']
receiver = "night"
mute_time_intervals = ["minute"]

[[inhibit_rules]]
source_matchers = ['kind="hang"']
target_matchers = ['kind=~"straggler|slowdown"']
equal = ["job"]

[[time_intervals]]
name = "minute"
time_intervals = [{ times = [{ start_time = "%s", end_time = "%s" }] }]
"""
END_S = 180.0
BEGINS_AT_SECOND = 27
"""The minute in which `night` is muted is that from 33 s to 93 s of the story."""
SILENCE_S = (22.0, 75.0)
STEP_S = 10.0
"""The grouping step: `group_interval`."""

BUSY_S = 2.0
"""Longest request: nothing in the story happens within 2 s of a flush."""

OPEN = {
    1: {"job": "a"},
    2: {"job": "a", "hosts": ("node-b",)},
    3: {"job": "a", "hosts": ("node-c",)},
    4: {"job": "b", "kind": "hang", "severity": "critical"},
    5: {"job": "b"},
    6: {"job": "c", "hosts": ("node-s",)},
    7: {"job": "d", "whose": JobProject("d", "night")},
    8: {"job": "d", "kind": "slowdown", "whose": JobProject("d", "night")},
    9: {"job": "e"},
}
STORY = [
    (0, 1, "open"),
    (1, 2, "open"),
    (2, 4, "open"),
    (5, 7, "open"),
    (10, 5, "open"),
    (18, 3, "open"),
    (26, 6, "open"),
    (40, 4, "resolved"),
    (50, 8, "open"),
    (60, 9, "open"),
    (61, 9, "resolved"),
    (90, 1, "resolved"),
    (98, 2, "resolved"),
    (119, 3, "resolved"),
]
"""Second, incident, state. Nothing happens within 2 s of a flush of its group, so that load cannot change the order."""


def data_of(number, state="open"):
    fields = {"whose": JobProject("")} | OPEN[number]
    whose = fields.pop("whose")
    place = {"id": f"inc_{number}", "scope": IncidentScope.of_rank(number), "state": state}
    what = "resolved" if state == "resolved" else "opened"
    return json.loads(incident_message(transition(what, 1, **place, **fields), {}, whose))["data"]


def iso(unix_s):
    return datetime.fromtimestamp(unix_s, UTC).isoformat()


def minute_after(unix_s, minutes):
    return time.strftime("%H:%M", time.gmtime(unix_s // 60 * 60 + 60 * minutes))


def wait_until(unix_s):
    time.sleep(max(unix_s - time.time(), 0.0))


def play(alertmanager, began_s):
    """Give the story to the Alertmanager; returns when what really happened."""
    happened = []
    quiet = {"startsAt": iso(began_s + SILENCE_S[0]), "endsAt": iso(began_s + SILENCE_S[1])}
    matchers = [{"name": "host", "value": "node-s", "isRegex": False, "isEqual": True}]
    answer = alertmanager.post(
        "/api/v2/silences", json=quiet | {"matchers": matchers, "createdBy": "x", "comment": "x"}
    )
    assert answer.is_success, answer.text
    began = {}
    for second, number, state in STORY:
        wait_until(began_s + second)
        now_s = time.time()
        began.setdefault(number, now_s)
        ends = {"endsAt": iso(now_s)} if state == "resolved" else {}
        alert = {"labels": incident_labels(data_of(number)), "startsAt": iso(began[number]), **ends}
        answer = alertmanager.post("/api/v2/alerts", json=[alert])
        assert answer.is_success, answer.text
        happened.append((now_s, number, state))
        assert time.time() - now_s < BUSY_S, "this machine is too busy to compare moments"
    wait_until(began_s + END_S)
    return happened


def ours(routes, happened, began_s):
    """What our groups send of the same story, in steps of half a second as the notifier takes them."""
    muted = silence(
        matchers=("host=node-s",),
        starts_unix_ns=int((began_s + SILENCE_S[0]) * 1e9),
        ends_unix_ns=int((began_s + SILENCE_S[1]) * 1e9),
    )
    groups = IncidentGroups(read_routes(routes), [], int(began_s * 1e9))
    left, sent = list(happened), []
    for tick in range(int(END_S * 2)):
        now_unix_ns = int((began_s + tick / 2) * 1e9)
        while left and left[0][0] * 1e9 <= now_unix_ns:
            at_s, number, state = left.pop(0)
            groups.take(data_of(number, state), int(at_s * 1e9), now_unix_ns)
        for message in groups.flush(now_unix_ns, lambda labels, now=now_unix_ns: mutes(muted, labels, now)).messages:
            told = [
                frozenset(int(one.incident_id.removeprefix("inc_")) for one in part)
                for part in (message.open, message.resolved)
            ]
            sent.append((tick / 2, message.receiver, *told))
    return sent


def theirs(arrivals, began_s):
    number_of = {frozenset(incident_labels(data_of(number)).items()): number for number in OPEN}
    sent = []
    for call in arrivals:
        receiver, body = call.path.rpartition("/")[2], json.loads(call.body)
        told = {"firing": set(), "resolved": set()}
        for alert in body["alerts"]:
            told[alert["status"]].add(number_of[frozenset(alert["labels"].items())])
        sent.append((call.at_s - began_s, receiver, frozenset(told["firing"]), frozenset(told["resolved"])))
    return sent


def by_group(sent):
    """The messages of each receiver about each job, in order: what they tell, and when."""
    found = {}
    for at_s, receiver, still_open, resolved in sorted(sent, key=lambda one: one[0]):
        job = OPEN[min(still_open | resolved)]["job"]
        found.setdefault((receiver, job), []).append((at_s, still_open, resolved))
    return found


def test_both_notify_of_the_same_within_the_grouping_step(tmp_path):
    began_s = time.time() // 60 * 60 + BEGINS_AT_SECOND
    began_s += 60 if began_s < time.time() + 10 else 0
    routes = ROUTES % (minute_after(began_s, 1), minute_after(began_s, 2))
    with webhook_receiver() as hooks:
        names = sorted(read_routes(routes).receivers())
        with (
            running_alertmanager(tmp_path, tomllib.loads(routes), names, hooks.url) as url,
            httpx2.Client(base_url=url) as alertmanager,
        ):
            happened = play(alertmanager, began_s)
        found = by_group(theirs(hooks.calls, began_s - time.time() + time.monotonic()))
        expected = by_group(ours(routes, happened, began_s))
    told = {key: [message[1:] for message in messages] for key, messages in found.items()}
    assert told == {key: [message[1:] for message in messages] for key, messages in expected.items()}
    late = [
        abs(one[0] - other[0])
        for key, messages in found.items()
        for one, other in zip(messages, expected[key], strict=True)
    ]
    assert max(late) < STEP_S
    assert {key[0] for key in told} == {"all", "night", "pager"}
    assert ("all", "e") not in told
