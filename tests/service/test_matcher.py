"""Matchers: Alertmanager's syntax and meaning."""

import pytest

from rankwatch_service.labels import PATTERN_CHARS_MAX, Matcher, match_all, parse_matcher, parse_matchers


@pytest.mark.parametrize(
    ("text", "name", "operator", "value"),
    [
        ('job="gpt"', "job", "=", "gpt"),
        ("job=gpt", "job", "=", "gpt"),
        (' job  !=  "a b" ', "job", "!=", "a b"),
        ('job=~"gpt-.*"', "job", "=~", "gpt-.*"),
        ("rank!~[0-7]", "rank", "!~", "[0-7]"),
        ('owner=""', "owner", "=", ""),
        ("owner=", "owner", "=", ""),
        (r'job="a \"b\" \\ c"', "job", "=", 'a "b" \\ c'),
        (r'job="two\nlines"', "job", "=", "two\nlines"),
        (r'job=~"\d+"', "job", "=~", r"\d+"),
        (r"job=\d", "job", "=", r"\d"),
        ('job="a=~b"', "job", "=", "a=~b"),
    ],
)
def test_a_matcher_is_read_as_alertmanager_reads_it(text, name, operator, value):
    assert parse_matcher(text) == Matcher(name, operator, value)
    assert parse_matcher(str(parse_matcher(text))) == Matcher(name, operator, value)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("job", "not a matcher"),
        ('="gpt"', "not a matcher"),
        ('1job="gpt"', "not a matcher"),
        ('job="gpt', "quote"),
        ('job=gpt"', "quote"),
        ('job="a"b"', "quote"),
        ('job=~"("', "not a regular expression"),
        (r"job=~(a)\1", "backreferences are not supported"),
        ("job=~(a{1000}){1000}", "not a regular expression"),
        (f"job=~{'a' * (PATTERN_CHARS_MAX + 1)}", "longer than"),
    ],
)
def test_a_malformed_matcher_is_refused_with_the_reason(text, reported):
    with pytest.raises(ValueError, match=reported):
        parse_matcher(text)


@pytest.mark.parametrize(
    ("matcher", "labels", "matches"),
    [
        ("job=gpt", {"job": "gpt"}, True),
        ("job=gpt", {"job": "gpt-2"}, False),
        ("job=gpt", {}, False),
        ("job!=gpt", {"job": "bert"}, True),
        ("job!=gpt", {}, True),
        ("job=~gpt", {"job": "gpt-2"}, False),
        ("job=~gpt.*", {"job": "gpt-2"}, True),
        ("job=~a|b", {"job": "ab"}, False),
        ("job=~.*", {}, True),
        ("job=~.+", {}, False),
        ("job!~gpt.*", {"job": "gpt-2"}, False),
        ("job!~gpt.*", {}, True),
        ("job=~.*", {"job": "a\nb"}, False),
        ("job=~.", {"job": "\ud800"}, True),
        ("owner=", {}, True),
        ("owner!=", {}, False),
    ],
)
def test_regular_expressions_are_anchored_and_a_missing_label_is_empty(matcher, labels, matches):
    assert parse_matcher(matcher).matches(labels) is matches


def test_several_matchers_are_separated_by_commas_and_must_all_match():
    matchers = parse_matchers('{job=~"a{1,2}", kind="hang",severity!=info}')
    assert list(map(str, matchers)) == ['job=~"a{1,2}"', 'kind="hang"', 'severity!="info"']
    assert match_all(matchers, {"job": "aa", "kind": "hang", "severity": "critical"})
    assert not match_all(matchers, {"job": "aa", "kind": "hang", "severity": "info"})
    assert parse_matchers("{}") == ()


def test_no_regular_expression_holds_up_whoever_matches_it():
    # A backtracking engine would need 2^200 steps.
    assert not parse_matcher("job=~(a+)+b").matches({"job": "a" * 200})
