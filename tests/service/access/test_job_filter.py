"""Patterns of names of jobs: what the database selects is what the filter includes."""

from sqlalchemy import select

from rankwatch_service.access.job_filter import JobFilter
from rankwatch_service.store.models import Setting
from tests.support.store.database import add, values_of

NAMES = (
    "llm-7b",
    "LLM-7B",
    "llm-70b",
    "llm_7b",
    "llm%7b",
    "vision",
    "a*b",
    "aXb",
    "a?b",
    "a[b]",
    "ab",
    "a\\b",
    "é-1",
    "c]d",
)
"""Names that a careless translation of a pattern would confuse."""


CASES = {
    (): set(NAMES),
    ("*",): set(NAMES),
    ("vision", "*"): set(NAMES),
    ("vision",): {"vision"},
    ("vision", "ab"): {"vision", "ab"},
    ("llm-*",): {"llm-7b", "llm-70b"},
    ("LLM*",): {"LLM-7B"},
    ("llm?7b",): {"llm-7b", "llm_7b", "llm%7b"},
    ("llm_7b",): {"llm_7b"},
    ("llm_*",): {"llm_7b"},
    ("llm%*",): {"llm%7b"},
    ("a[*]b",): {"a*b"},
    ("a[*]*",): {"a*b"},
    ("a[?]?",): {"a?b"},
    ("a[[]*",): {"a[b]"},
    ("a\\*",): {"a\\b"},
    ("?-1",): {"é-1"},
    ("c]*",): {"c]d"},
    ("vision", "llm-7?"): {"vision", "llm-7b"},
    ("nothing*",): set(),
}


def test_the_database_selects_what_the_filter_includes(engine):
    rows = [{"name": name, "value": {}, "updated_unix_ns": 0} for name in NAMES]
    add(engine, Setting, *rows)
    for patterns, expected in CASES.items():
        jobs = JobFilter(patterns)
        selected = values_of(engine, select(Setting.name).where(jobs.clause(Setting.name)))
        assert set(selected) & set(NAMES) == expected, patterns
        assert {name for name in NAMES if jobs.includes(name)} == expected, patterns


def test_a_job_of_any_name_has_a_filter_of_its_own():
    for name in NAMES:
        jobs = JobFilter.of(name)
        assert (jobs.only, jobs.every) == (name, False)
        assert [one for one in NAMES if jobs.includes(one)] == [name]


def test_a_filter_is_named_by_what_it_includes():
    assert str(JobFilter.of("")) == "every job"
    assert str(JobFilter(("*", "vision"))) == "every job"
    assert str(JobFilter.of("a*b")) == "job 'a*b'"
    assert str(JobFilter(("llm-*", "vision"))) == "jobs 'llm-*', 'vision'"
    assert JobFilter(("llm-*",)).only == ""
