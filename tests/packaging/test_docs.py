"""The documents name what there is: a map that is not tested rots."""

import re
from pathlib import Path

import pytest

from rankwatch_detectors.base import Kind

ROOT = Path(__file__).parents[2]
DESIGN = (ROOT / "docs" / "design.md").read_text()


def packages() -> list[str]:
    folders = [ROOT / "collectors" / "rankwatch", ROOT / "service" / "rankwatch_service"]
    return sorted(
        entry.name
        for folder in folders
        for entry in folder.iterdir()
        if entry.is_dir() and (entry / "__init__.py").exists()
    )


@pytest.mark.parametrize("name", packages())
def test_the_design_page_names_each_package(name):
    assert f"{name}/" in DESIGN


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("kind", [kind for kind in Kind if (ROOT / "docs" / "incidents" / f"{kind}.md").exists()])
def test_a_runbook_says_what_to_do_first(kind):
    text = (ROOT / "docs" / "incidents" / f"{kind}.md").read_text()
    assert re.search(r"^## .*[Dd]o first", text, re.MULTILINE), (
        f"docs/incidents/{kind}.md has no section on what to do first"
    )
