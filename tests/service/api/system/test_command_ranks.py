"""What each rank has answered to a command, from the views of its agents."""

from rankwatch_service.access.scopes import Scope
from tests.support.orders.rows import add_command, add_view, answered
from tests.support.values.batches import progress

ON_BOTH_DATABASES = True


def ranks(api, **how):
    answer = api.get("/api/v1/commands/cmd_1/ranks", **how)
    return answer.json() if answer.status_code == 200 else answer.status_code


def test_each_rank_has_its_answer_to_the_newest_order_and_none_to_another(api):
    now = api.clock.unix_ns()
    add_command(api.engine, now)
    add_view(api.engine, now, [answered(1, "failed", "disk full"), answered(0, "done", "/ckpt/1240")])
    add_view(api.engine, now, [answered(2, "done", order="ord_0"), progress(3, 1_239)], host="node-2")
    found = ranks(api)
    assert found["order"] == "ord_1"
    told = [(one["rank"], one["host"], one["answer"], one["step"], one["detail"]) for one in found["items"]]
    assert told == [
        (0, "node-1", "done", 1_240, "/ckpt/1240"),
        (1, "node-1", "failed", 1_240, "disk full"),
        (2, "node-2", "", -1, ""),
        (3, "node-2", "", -1, ""),
    ]


def test_after_a_rollback_the_ranks_answer_in_the_next_attempt_of_the_launch(api):
    now = api.clock.unix_ns()
    add_command(api.engine, now)
    add_view(api.engine, now, [progress(0, 1_240)])
    add_view(api.engine, now + 1, [answered(0, "went")], attempt="l.1")
    add_view(api.engine, now + 2, [progress(0, 1)], attempt="other.0")
    assert [one["answer"] for one in ranks(api)["items"]] == ["went"]


def test_who_may_not_see_the_job_gets_404_and_silence_of_the_agents_is_no_answer(api):
    add_command(api.engine, api.clock.unix_ns())
    assert ranks(api) == {"order": "ord_1", "items": []}
    assert ranks(api, token=api.token(Scope.READ, job="other")) == 404
