"""Each bug of `mutations.toml` can be tried: its text is there once, and so are the tests that must catch it."""

import re

import pytest

from tests.mutations.__main__ import TREE, Mutation, mutations

ALL = mutations()


def test_there_are_twenty_of_each_area_and_no_two_of_one_name() -> None:
    assert [sum(one.area == area for one in ALL) for area in ("stream", "detectors", "agent")] == [20, 20, 20]
    assert len({one.id for one in ALL}) == len(ALL)


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.id)
def test_a_bug_and_its_tests_are_there(mutation: Mutation) -> None:
    mutation.file_in(TREE)
    texts = "".join(path.read_text() for folder in mutation.tests for path in (TREE / folder).rglob("test_*.py"))
    for name in re.findall(r"test_\w+", mutation.k):
        assert f"def {name}" in texts, f"{name} is in none of {mutation.tests}: name another test that catches it"
