"""Groups over time: when which receiver is notified, with a clock that the test moves."""

from collections.abc import Callable

import msgspec

from rankwatch_service.labels.incident_labels import LABEL_NAMES, incident_labels
from rankwatch_service.labels.matcher import Labels
from rankwatch_service.policy.notification import incident_message
from rankwatch_service.routing.group import Group
from rankwatch_service.routing.grouping import IncidentGroups
from rankwatch_service.routing.written_routes import read_routes
from tests.support.values.incidents import transition

DEFAULT = '[route]\nreceiver = "pager"\ngroup_by = ["job"]\n'


def data_of(incident_id: str, **fields) -> dict:
    message = incident_message(transition(**{"id": incident_id, "job": "gpt"} | fields), {})
    return msgspec.json.decode(message)["data"]


class Story:
    """A grouping and the time in seconds; what was sent is written as "RECEIVER REASON: OPEN | RESOLVED"."""

    def __init__(self, routes: str = DEFAULT) -> None:
        self.now_s = 1_000_000.0
        self.grouping = IncidentGroups(read_routes(routes), [], 0)
        self.escalates = "escalations" in routes
        self.ids: list[str] = []
        self.silenced: Callable[[Labels], bool] = lambda _: False

    @property
    def now_unix_ns(self) -> int:
        return int(self.now_s * 1e9)

    def put(self, incident_id: str, late_s: float = 0.0, **fields) -> None:
        at_unix_ns = self.now_unix_ns - int(late_s * 1e9)
        self.grouping.take(data_of(incident_id, **fields), at_unix_ns, self.now_unix_ns)

    def after(self, seconds: float, silenced: Callable[[Labels], bool] | None = None) -> list[str]:
        """What is sent in the next seconds, one flush each second."""
        sent = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            due_s = min((group.next_flush_unix_ns / 1e9 for group in self.grouping.groups.values()), default=end_s)
            # In steps of one second, but for the time in which nothing can be due.
            self.now_s = self.now_s + 1 if self.escalates else min(max(due_s, self.now_s + 1), end_s)
            for message in self.grouping.flush(self.now_unix_ns, silenced or self.silenced).messages:
                still_open = " ".join(sorted(member.incident_id for member in message.open))
                resolved = " ".join(sorted(member.incident_id for member in message.resolved))
                sent.append(f"{message.receiver} {message.reason}: {still_open} | {resolved}")
                self.ids.append(message.id)
        return sent

    def restart(self, routes: str = DEFAULT) -> None:
        """Store and load everything, with these routes."""
        stored = [msgspec.json.encode(group) for group in self.grouping.groups.values()]
        groups = [msgspec.json.decode(group, type=Group) for group in stored]
        self.grouping = IncidentGroups(read_routes(routes), groups, self.now_unix_ns)


def test_what_opens_within_group_wait_is_one_message():
    story = Story()
    story.put("a")
    assert story.after(20) == []
    story.put("b")
    assert story.after(9) == []
    assert story.after(1) == ["pager first notification: a b | "]
    assert story.after(600) == []


def test_what_opens_later_waits_for_the_group_interval():
    story = Story()
    story.put("a")
    story.after(31)
    story.put("b")
    assert story.after(298) == []
    assert story.after(1) == ["pager new incidents in group: a b | "]


def test_what_resolves_within_group_wait_notifies_nobody():
    story = Story()
    story.put("a")
    story.after(10)
    story.put("a", state="resolved")
    assert story.after(3_600) == []
    assert story.grouping.groups == {}


def test_a_resolution_is_sent_after_the_group_interval_and_ends_the_group():
    story = Story()
    story.put("a")
    story.put("b")
    story.after(30)
    story.put("a", state="resolved")
    assert story.after(300) == ["pager new resolved incidents: b | a"]
    story.put("b", state="resolved")
    assert story.after(300) == ["pager all incidents resolved:  | b"]
    story.after(300)
    assert story.grouping.groups == {}


def test_each_job_has_a_group_and_a_message_of_its_own():
    story = Story()
    story.put("a")
    story.put("b", job="bert")
    assert story.after(30) == ["pager first notification: a | ", "pager first notification: b | "]
    assert len(set(story.ids)) == 2


def test_an_incident_that_is_older_than_group_wait_is_not_delayed_again():
    story = Story()
    story.put("a", late_s=60)
    assert story.after(1) == ["pager first notification: a | "]


def test_an_old_incident_takes_those_that_wait_along():
    story = Story()
    story.put("a")
    story.put("b", late_s=60)
    assert story.after(1) == ["pager first notification: a b | "]


def test_a_message_is_repeated_at_the_first_group_interval_after_the_repeat_interval():
    story = Story(DEFAULT + 'group_interval = "7m"\nrepeat_interval = "1h"\n')
    story.put("a")
    story.after(30)
    assert story.after(9 * 420 - 1) == []
    assert story.after(1) == ["pager repeat interval elapsed: a | "]


def test_what_is_acknowledged_is_not_repeated():
    story = Story(DEFAULT + 'repeat_interval = "1h"\n')
    story.put("a")
    story.after(30)
    story.put("a", state="acknowledged")
    assert story.after(3 * 3_600) == []
    story.put("b")
    assert story.after(300) == ["pager new incidents in group: a b | "]
    assert story.after(2 * 3_600) == ["pager repeat interval elapsed: a b | "]


def test_an_incident_that_becomes_graver_is_news():
    story = Story()
    story.put("a")
    story.after(30)
    story.put("a", severity="critical")
    assert story.after(300) == ["pager new incidents in group: a | "]


def test_evidence_that_changes_no_label_is_no_news():
    story = Story()
    story.put("a")
    story.after(30)
    story.put("a", summary="Rank 3 runs at 0.5 of its peers")
    assert story.after(600) == []


def test_an_incident_that_becomes_graver_goes_to_the_new_receiver_and_ends_with_the_old_one_too():
    story = Story(DEFAULT + '[[route.routes]]\nmatchers = ["severity=critical"]\nreceiver = "phone"\n')
    story.put("a")
    story.after(30)
    story.put("a", severity="critical")
    assert story.after(600) == ["phone first notification: a | "]
    story.put("a", severity="critical", state="resolved")
    assert sorted(story.after(600)) == [
        "pager all incidents resolved:  | a",
        "phone all incidents resolved:  | a",
    ]


def test_an_incident_that_becomes_graver_before_the_first_message_goes_to_the_new_receiver_alone():
    story = Story(DEFAULT + '[[route.routes]]\nmatchers = ["severity=critical"]\nreceiver = "phone"\n')
    story.put("a")
    story.after(10)
    story.put("a", severity="critical")
    assert story.after(600) == ["phone first notification: a | "]


def test_a_route_without_a_receiver_notifies_nobody_and_inhibits_all_the_same():
    story = Story(
        DEFAULT
        + '[[route.routes]]\nmatchers = ["kind=hang"]\nreceiver = ""\n'
        + '[[inhibit_rules]]\nsource_matchers = ["kind=hang"]\ntarget_matchers = ["kind=straggler"]\nequal = ["job"]\n'
    )
    story.put("hang", kind="hang")
    story.put("slow")
    assert story.after(600) == []
    story.put("hang", kind="hang", state="resolved")
    assert story.after(600) == ["pager first notification: slow | "]


def test_what_is_inhibited_after_it_was_notified_is_neither_repeated_nor_called_resolved():
    story = Story(
        DEFAULT + '[[inhibit_rules]]\nsource_matchers = ["kind=hang"]\ntarget_matchers = ["kind=straggler"]\n'
    )
    story.put("slow")
    story.after(30)
    story.put("hang", kind="hang", job="bert")
    assert story.after(5 * 3_600) == ["pager first notification: hang | ", "pager repeat interval elapsed: hang | "]


def test_a_silence_mutes_while_it_lasts():
    story = Story()
    story.put("a")
    assert story.after(600, silenced=lambda labels: labels["job"] == "gpt") == []
    assert story.after(300) == ["pager first notification: a | "]


def test_a_muted_route_sends_what_is_still_open_when_its_time_comes():
    story = Story(
        DEFAULT
        + '[[route.routes]]\nmatchers = ["job=gpt"]\nmute_time_intervals = ["morning"]\n'
        + '[[time_intervals]]\nname = "morning"\n'
        + 'time_intervals = [{ times = [{ start_time = "13:00", end_time = "14:00" }] }]\n'
    )
    assert story.now_s % 86_400 == (13 * 60 + 46) * 60 + 40
    story.put("a")
    story.put("b")
    assert story.after(300) == []
    story.put("b", state="resolved")
    assert story.after(1_200) == ["pager first notification: a | "]


def test_what_nobody_acknowledges_goes_to_the_next_receiver():
    story = Story(
        DEFAULT + 'escalations = [{ after = "15m", receiver = "lead" }, { after = "1h", receiver = "head" }]\n'
    )
    story.put("a")
    story.after(30)
    assert story.after(899) == []
    assert story.after(1) == ["lead not acknowledged in time: a | "]
    story.put("a", state="acknowledged")
    assert story.after(2 * 3_600) == []
    story.put("a", state="resolved")
    assert story.after(300) == ["pager all incidents resolved:  | a", "lead all incidents resolved:  | a"]


def test_what_is_acknowledged_in_time_is_not_escalated():
    story = Story(DEFAULT + 'escalations = [{ after = "15m", receiver = "lead" }]\n')
    story.put("a")
    story.put("b")
    story.after(60)
    story.put("a", state="acknowledged")
    assert story.after(1_200) == ["lead not acknowledged in time: b | "]
    story.put("a")
    assert story.after(1) == ["lead not acknowledged in time: a b | "]


def test_an_escalated_incident_that_becomes_graver_is_news_to_who_got_it():
    story = Story(DEFAULT + 'escalations = [{ after = "15m", receiver = "lead" }]\n')
    story.put("a")
    story.after(1_000)
    story.put("a", state="acknowledged", severity="critical")
    assert sorted(story.after(300)) == [
        "lead not acknowledged in time: a | ",
        "pager new incidents in group: a | ",
    ]


def test_a_restart_neither_repeats_nor_forgets():
    story = Story(DEFAULT + 'escalations = [{ after = "15m", receiver = "lead" }]\n')
    calm = Story(DEFAULT + 'escalations = [{ after = "15m", receiver = "lead" }]\n')
    sent: dict[Story, list[str]] = {story: [], calm: []}
    for one in sent:
        for action in (lambda s: s.put("a"), lambda s: s.put("b"), lambda s: s.put("a", state="resolved")):
            action(one)
            for _ in range(12):
                sent[one] += one.after(100)
                if one is story:
                    one.restart(DEFAULT + 'escalations = [{ after = "15m", receiver = "lead" }]\n')
    assert sent[story] == sent[calm]
    assert story.ids == calm.ids
    assert len(set(story.ids)) == len(story.ids)


def test_a_group_that_begins_anew_has_other_message_ids():
    story = Story()
    for _ in range(2):
        story.put("a")
        story.after(30)
        story.put("a", state="resolved")
        story.after(600)
    assert len(story.ids) == 4
    assert len(set(story.ids)) == 4


def test_new_routes_take_over_what_is_open():
    story = Story()
    story.put("a")
    story.after(30)
    story.restart(DEFAULT + '[[route.routes]]\nmatchers = ["job=gpt"]\nreceiver = "gpt"\n')
    assert story.after(600) == ["gpt first notification: a | "]


def test_other_labels_to_group_by_make_other_groups_and_each_receiver_gets_one_message():
    story = Story()
    story.put("a")
    story.after(30)
    story.restart(DEFAULT.replace('"job"', '"kind"').replace("pager", "phone"))
    assert story.after(600) == ["phone first notification: a | "]


def test_after_an_outage_a_flush_is_late_once_and_then_in_time():
    story = Story()
    story.put("a")
    story.now_s += 10_000
    assert story.after(1) == ["pager first notification: a | "]
    story.put("b")
    assert story.after(300) == ["pager new incidents in group: a b | "]


def test_deleted_incidents_are_forgotten():
    story = Story()
    story.put("a")
    story.put("b")
    story.after(30)
    assert story.grouping.forget(["a"]) == {'{}:{job="gpt"}'}
    assert story.grouping.members() == {"b"}


def test_labels_describe_the_incident_and_empty_ones_are_missing():
    labels = incident_labels(data_of("a", kind="rank_lost"))
    assert labels == {
        "alertname": "RankLost",
        "kind": "rank_lost",
        "severity": "warning",
        "job": "gpt",
        "attempt": "launch.0",
        "scope": "rank:3",
        "host": "node-a",
        "rank": "3",
    }
    assert set(labels) <= set(LABEL_NAMES)
    assert "host" not in incident_labels(data_of("a", hosts=("node-a", "node-b")))
