"""Rules as people write them: what is accepted, and what is said of what is not."""

from __future__ import annotations

import pytest

from rankwatch_detectors.metric_rule import Condition, Direction, MetricRule
from rankwatch_service.written_rule import RULES_MAX, WrittenRule, read_toml

WHOLE = """
[[rule]]
name = "reward-fell"
metric = "reward"
when = "change"
direction = "down"
hold_s = 300
severity = "critical"
jobs = ["rl-*"]

[[rule]]
name = "memory"
metric = "memory_gb"
when = "above"
value = 70
each_rank = true
"""


def test_a_file_gives_its_rules_in_order():
    falls = {"severity": "critical", "direction": Direction.DOWN, "jobs": ("rl-*",)}
    assert [rule.rule() for rule in read_toml(WHOLE)] == [
        MetricRule("reward-fell", "reward", Condition.CHANGE, hold_s=300.0, **falls),
        MetricRule("memory", "memory_gb", Condition.ABOVE, 70.0, each_rank=True),
    ]


def test_a_rule_comes_back_as_it_was_written():
    for rule in read_toml(WHOLE):
        assert WrittenRule.of(rule.rule()) == rule


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ('when = "above"', "rule 1 (r): when = above needs a value"),
        ('when = "peers"\nvalue = 1', "rule 1 (r): when = peers needs a value, the ratio"),
        ('when = "absent"', "rule 1 (r): when = absent needs hold_s"),
        ('when = "change"\nvalue = 3', "rule 1 (r): when = change takes no value"),
        ('when = "absent"\nhold_s = 3\neach_rank = true', "rule 1 (r): each_rank is for above and below only"),
        ('when = "above"\nvalue = 3\ndirection = "up"', "rule 1 (r): direction is for change only"),
        ('when = "above"\nvalue = nan', "rule 1 (r): value:"),
        ('when = "above"\nvalue = 3\nhold_s = -1', "rule 1 (r): hold_s:"),
        ('when = "often"', "rule 1 (r): when:"),
        ('when = "above"\nvalue = 3\nhold = 3', "rule 1 (r): hold:"),
    ],
)
def test_a_wrong_rule_is_named_with_what_is_wrong(fields, complaint):
    with pytest.raises(ValueError, match="rule 1") as refused:
        read_toml(f'[[rule]]\nname = "r"\nmetric = "m"\n{fields}\n')
    assert str(refused.value).startswith(complaint)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[rule]\nname = "r"', "two brackets"),
        ("[[rules]]", "no table 'rules'"),
        ("rule = [1]", "rule 1"),
        ("not toml", "Expected"),
        (WHOLE + WHOLE, "two rules have the name 'reward-fell'"),
    ],
)
def test_a_wrong_file_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_toml(text)


def test_there_are_no_more_rules_than_the_limit():
    one = '[[rule]]\nname = "r{}"\nmetric = "m"\nwhen = "above"\nvalue = 3\n'
    assert len(read_toml("".join(map(one.format, range(RULES_MAX))))) == RULES_MAX
    with pytest.raises(ValueError, match=f"the limit is {RULES_MAX} rules"):
        read_toml("".join(map(one.format, range(RULES_MAX + 1))))
