"""Receivers of other types, tests of them, alerts that wait, and what became of notifications, by the command line."""

from rankwatch_service.api.routes.notifications import deliveries


def test_a_receiver_of_another_type_takes_its_secret_from_a_file(terminal, to, tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789ABCDEF\n")
    target = ("https://events.pagerduty.com/v2/enqueue", "--type", "pagerduty", "--secret-file", str(key))
    status, out, err = terminal.run("receivers", "add", "pd", *target, *to)
    assert (status, out, "receivers test pd" in err) == (0, "", True), err
    assert "pagerduty" in terminal.run("receivers", *to)[1]
    status, _, err = terminal.run("receivers", "add", "mail", "mailto:a@example.com", *to)
    assert (status != 0, "RANKWATCH_SMTP_URL" in err) == (True, True)
    assert terminal.run("receivers", "remove", "pd", *to)[0] == 0


def test_a_test_of_a_receiver_says_that_nobody_delivers(terminal, to, monkeypatch):
    monkeypatch.setattr(deliveries, "TRIED_WITHIN_S", 0.0)
    assert terminal.run("receivers", "add", "try", "https://hooks.example/hook", *to)[0] == 0
    status, _, err = terminal.run("receivers", "test", "try", *to)
    assert (status, "does the role notify run" in err) == (1, True)
    status, out, _ = terminal.run("notifications", "--state", "waiting", "--receiver", "try", *to)
    assert (status, "waiting" in out) == (0, True)
    assert terminal.run("receivers", "remove", "try", *to)[0] == 0


def test_alerts_that_wait_are_listed_with_the_reason(terminal, api, to):
    assert "no alert waits" in terminal.run("alerts", *to)[2]
    assert api.post("/api/v2/alerts", [{"labels": {"alertname": "Full", "job_name": "gone"}}]).status_code == 200
    status, out, _ = terminal.run("alerts", *to)
    assert (status, "Full" in out, "is named gone." in " ".join(out.split())) == (0, True, True)


def test_a_receiver_is_added_with_matchers_and_an_escalation(terminal, api, to):
    options = ("--match", "host=a", "--after", "15m")
    assert terminal.run("receivers", "add", "lead", "https://hooks.example/lead", *options, *to)[0] == 0
    found = api.get("/api/v1/receivers/lead").json()
    assert (found["matchers"], found["after_s"]) == (['host="a"'], 900)
    assert "900 s" in terminal.run("receivers", *to)[1]
    assert terminal.run("receivers", "remove", "lead", *to)[0] == 0
