"""Inhibition: what mutes what."""

import pytest

from rankwatch_service.labels.matcher import parse_matchers
from rankwatch_service.routing.inhibition import InhibitRule, inhibited


def rule(source: str, target: str, *equal: str) -> InhibitRule:
    return InhibitRule(parse_matchers(source), parse_matchers(target), equal)


HANG = {"kind": "hang", "severity": "critical", "job": "gpt"}
SLOW = {"kind": "straggler", "severity": "warning", "job": "gpt"}


@pytest.mark.parametrize(
    ("one", "source", "target", "mutes"),
    [
        (rule("kind=hang", "kind=straggler", "job"), HANG, SLOW, True),
        (rule("kind=hang", "kind=straggler", "job"), HANG | {"job": "bert"}, SLOW, False),
        (rule("kind=hang", "kind=straggler"), HANG | {"job": "bert"}, SLOW, True),
        (rule("kind=hang", "kind=straggler", "owner"), HANG, SLOW, True),
        (rule("kind=hang", "kind=straggler", "owner"), HANG | {"owner": "ann"}, SLOW, False),
        (rule("kind=hang", "severity=critical"), HANG, SLOW, False),
        (rule("severity=critical", "severity=critical", "job"), HANG, HANG | {"kind": "nonfinite"}, False),
        (rule("severity=critical", "job=gpt"), HANG, HANG | {"kind": "nonfinite"}, False),
        (rule("kind=hang", "job=gpt"), HANG, HANG | {"kind": "nonfinite"}, True),
    ],
)
def test_an_open_incident_mutes_what_matches_the_target_and_not_itself(one, source, target, mutes):
    assert inhibited([one], target, [source]) is mutes
    assert not inhibited([one], source, [source])
