"""The route tree: who gets which incident. The same trees go to Alertmanager's own tool, where it is installed."""

import shutil
import subprocess
import tomllib

import pytest
import yaml

from rankwatch_service.routing.written_routes import read_routes

TREE = """
[route]
receiver = "root"
group_by = ["job", "kind"]
group_wait = "10s"

[[route.routes]]
matchers = ['severity="critical"']
receiver = "pager"
continue = true

[[route.routes]]
matchers = ['kind=~"hang|rank_lost"']
receiver = "training"
group_by = ["job"]

[[route.routes.routes]]
matchers = ['project="nlp"', 'job!~"test-.*"']
receiver = "nlp"
group_wait = "1s"

[[route.routes.routes]]
matchers = ['owner!=""']
repeat_interval = "1h"

[[route.routes]]
matchers = ['severity=~"info|warning"', 'job=""']
receiver = "never"

[[route.routes]]
matchers = ['kind="straggler"']
continue = true

[[route.routes]]
matchers = ['job="gpt"']
receiver = "gpt"
"""

CASES = [
    ({"severity": "critical", "kind": "nonfinite", "job": "bert"}, ["pager"]),
    ({"severity": "critical", "kind": "nonfinite", "job": "gpt"}, ["pager", "gpt"]),
    ({"severity": "critical", "kind": "hang", "job": "gpt"}, ["pager", "training"]),
    ({"severity": "warning", "kind": "hang", "job": "gpt", "project": "nlp"}, ["nlp"]),
    ({"severity": "warning", "kind": "rank_lost", "job": "test-1", "project": "nlp"}, ["training"]),
    ({"severity": "warning", "kind": "rank_lost", "job": "test-1", "owner": "ann"}, ["training"]),
    ({"severity": "warning", "kind": "hang_not", "job": "bert"}, ["root"]),
    ({"severity": "warning", "kind": "slowdown"}, ["never"]),
    ({"severity": "warning", "kind": "straggler", "job": "gpt"}, ["root", "gpt"]),
    ({"severity": "info", "kind": "straggler", "job": "bert"}, ["root"]),
    ({}, ["root"]),
]


def found(labels: dict[str, str]) -> list[str]:
    return [route.receiver for route in read_routes(TREE).root.matching(labels)]


@pytest.mark.parametrize(("labels", "receivers"), CASES)
def test_the_first_match_takes_an_incident_unless_it_continues(labels, receivers):
    assert found(labels) == receivers


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed (Debian: prometheus-alertmanager)")
def test_amtool_finds_the_same_receivers_in_the_same_tree(tmp_path):
    receivers = [{"name": name} for name in sorted(read_routes(TREE).receivers())]
    file = tmp_path / "alertmanager.yml"
    file.write_text(yaml.safe_dump(tomllib.loads(TREE) | {"receivers": receivers}))
    for labels, expected in CASES:
        told = subprocess.run(
            ["amtool", "config", "routes", "test", f"--config.file={file}", *(f"{k}={v}" for k, v in labels.items())],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        assert told.strip().split(",") == expected, labels


def test_a_child_inherits_what_it_does_not_say():
    nlp = next(route for route in read_routes(TREE).root.walk() if route.receiver == "nlp")
    assert (nlp.group_by, nlp.group_wait_s, nlp.group_interval_s, nlp.repeat_interval_s) == (("job",), 1, 300, 14_400)
    owned = next(route for route in read_routes(TREE).root.walk() if route.repeat_interval_s == 3_600)
    assert (owned.receiver, owned.group_wait_s) == ("training", 10)


def test_a_group_is_known_by_the_route_and_the_labels_it_groups_by():
    labels = {"severity": "critical", "kind": "hang", "job": 'a "b"', "owner": "ann"}
    keys = [route.group_key(labels) for route in read_routes(TREE).root.matching(labels)]
    assert keys == [
        r'{}/{severity="critical"}:{job="a \"b\"", kind="hang"}',
        r'{}/{kind=~"hang|rank_lost"}/{owner!=""}:{job="a \"b\""}',
    ]


def test_routes_with_equal_matchers_have_keys_of_their_own():
    tree = '[route]\nreceiver = "a"\n' + 2 * '[[route.routes]]\nmatchers = ["job=gpt"]\ncontinue = true\n'
    assert [route.key for route in read_routes(tree).root.walk()] == ["{}", '{}/{job="gpt"}', '{}/{job="gpt"}#2']


def test_three_dots_group_by_every_label():
    root = read_routes('[route]\nreceiver = "a"\ngroup_by = ["..."]\n').root
    assert root.group_labels({"rank": "3", "job": "gpt"}) == {"job": "gpt", "rank": "3"}


def test_a_route_is_silent_outside_of_its_times():
    routing = read_routes(
        """
        [route]
        receiver = "a"
        routes = [
            { matchers = ["job=gpt"], mute_time_intervals = ["night"] },
            { matchers = ["job=bert"], active_time_intervals = ["night", "noon"] },
        ]
        [[time_intervals]]
        name = "night"
        time_intervals = [{ times = [{ start_time = "00:00", end_time = "06:00" }] }]
        [[time_intervals]]
        name = "noon"
        time_intervals = [{ times = [{ start_time = "12:00", end_time = "13:00" }] }]
        """
    )
    muted, active = routing.root.routes
    hours = (3, 9, 12)
    assert [routing.muted_by_time(muted, hour * 3_600) for hour in hours] == ["muted in night", "", ""]
    assert [routing.muted_by_time(active, hour * 3_600) for hour in hours] == ["", "active only in night, noon", ""]
    assert routing.muted_by_time(routing.root, 0) == ""
