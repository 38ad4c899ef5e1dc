from pathlib import Path

from rankwatch_service.api.http.openapi import text

FILE = Path(__file__).parents[3] / "docs" / "openapi.json"


def test_the_description_in_docs_is_current(api):
    assert FILE.read_text() == text(api.app), "run: python -m rankwatch_service.api > docs/openapi.json"


def test_every_operation_has_a_text_and_a_refusal(api):
    for path, methods in api.app.openapi()["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], f"{method} {path}"
            assert "application/problem+json" in operation["responses"]["default"]["content"]
