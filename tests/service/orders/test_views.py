"""Which views of agents are kept, on both databases."""

from sqlalchemy import select

from rankwatch.wire import View
from rankwatch_service.orders.running_attempt import ATTEMPTS_MAX, ReceivedView, store_views
from rankwatch_service.store.models import AgentView
from tests.support.store.rows import rows_of


def test_an_agent_keeps_the_views_of_its_newest_attempts_and_other_agents_keep_theirs(engine):
    store_views(engine, [ReceivedView(View("j", "l.0", "other", "b", 0, ()), "two", is_first=True)], 1)
    for k in range(ATTEMPTS_MAX + 3):
        views = [View("j", f"l.{k}", host, "b", 0, ()) for host in ("h0", "h1")]
        store_views(engine, [ReceivedView(view, "one", is_first=True) for view in views], 2 + k)
    kept = rows_of(engine, select(AgentView.host, AgentView.attempt).order_by(AgentView.host, AgentView.attempt))
    newest = [f"l.{k}" for k in range(3, ATTEMPTS_MAX + 3)]
    assert kept == [(host, one) for host in ("h0/one", "h1/one") for one in newest] + [("other/two", "l.0")]
