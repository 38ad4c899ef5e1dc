"""Two people edit the same thing: the one who has not seen the other's change overwrites nothing."""

import pytest

RULE = {"metric": "memory", "when": "above", "value": 10.0}
BOTH = pytest.mark.parametrize("path", ["policy", "rules"])


def read(api, path):
    answer = api.get(f"/api/v1/{path}")
    assert answer.status_code == 200
    return answer.headers["ETag"]


def change(api, path, number, tag=None):
    """Replace the policy or the rules by something else for each number."""
    body = {"limits": {"cool_down_s": number}} if path == "policy" else {"rules": [RULE | {"name": f"rule-{number}"}]}
    return api.ask("PUT", f"/api/v1/{path}", json=body, headers={} if tag is None else {"If-Match": tag})


@BOTH
def test_what_somebody_else_has_changed_since_is_not_overwritten(api, path):
    mine = read(api, path)
    assert change(api, path, 1).status_code == 200
    refused = change(api, path, 2, mine)
    assert refused.status_code == 412
    assert "read it again" in refused.json()["detail"]
    assert change(api, path, 2, read(api, path)).status_code == 200


@BOTH
def test_the_answer_of_a_write_has_the_tag_of_the_next_one(api, path):
    tag = change(api, path, 1, read(api, path)).headers["ETag"]
    assert tag == read(api, path)
    assert change(api, path, 2, f'"other", {tag}').status_code == 200


@BOTH
def test_without_a_tag_and_with_a_star_the_newest_is_replaced(api, path):
    assert [change(api, path, 1).status_code, change(api, path, 2, "*").status_code] == [200, 200]


def test_a_single_rule_is_checked_against_all_of_them(api):
    mine = read(api, "rules")
    change(api, "rules", 1)
    assert api.ask("DELETE", "/api/v1/rules/rule-1", headers={"If-Match": mine}).status_code == 412
    assert api.ask("DELETE", "/api/v1/rules/rule-1", headers={"If-Match": read(api, "rules")}).status_code == 204
