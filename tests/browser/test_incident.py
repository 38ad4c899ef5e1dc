"""An incident on one screen: what it is, what it costs, the chart of its kind, what to do, and who was notified."""

import re

import pytest
from playwright.sync_api import expect

from rankwatch_service.incidents.answers import impact, normal
from rankwatch_service.incidents.kinds import KINDS
from tests.browser.dashboard import S, card

pytestmark = pytest.mark.browser


def rank(number, **changes):
    known = {"rank": number, "local_rank": number % 8, "host": f"host-{number // 8}", "device_uuid": f"GPU-{number}",
             "dp": number // 4, "tp": number % 2, "pp": number // 2 % 2, "device_type": "cuda"}  # fmt: skip
    return known | changes


def low_end(page, locator):
    box = locator.bounding_box()
    return box["y"] + box["height"]


def test_the_answer_stands_on_one_screen(dashboard):
    dashboard.job("gpt", world_size=16)
    dashboard.attempt("gpt", ranks=[rank(n) for n in range(16)], can=["relaunch"])
    ways = {"action": "relaunch", "reason": "it does not pass by itself", "cost_gpu_hours": 4.5, "alternatives": []}
    dashboard.incidents(1, job="gpt", kind="hang", attempt="l.0", ranks=[9], hosts=["host-1"], devices=["GPU-9"],
                     impact_gpu_hours_per_hour=16.0, suggestion=ways, evidence={"missing": [], "waiting": []},
                     summary="No progress in step 480 for 10 s.")  # fmt: skip
    page = dashboard.goto(f"/incidents/{dashboard.incident_id('critical')}")
    expect(page.locator("h1")).to_have_text("Hang: rank 9 on host-1")
    expect(page.locator(".pills")).to_contain_text("No owner")
    strip = page.locator(".strip")
    expect(strip).to_contain_text(re.compile(r"GPUs idle16 of 16"))
    expect(strip).to_contain_text(re.compile(r"Lost so far0\.\d+ GPU-h"))
    expect(strip).to_contain_text("0 % of usual")
    location = card(page, "Location")
    expect(location).to_contain_text("dp 2 · tp 1 · pp 0")
    expect(location.get_by_role("link", name="host-1")).to_have_attribute("href", re.compile("/hosts/host-1$"))
    expect(location.get_by_role("link", name="GPU-9")).to_be_visible()
    todo = card(page, "What to do")
    expect(todo.locator("ol li")).to_have_count(3)
    expect(todo).to_contain_text("4.5 GPU-h")
    expect(todo).to_contain_text("it does not pass by itself")
    for name in ("Acknowledge", "Silence", "Resolve"):
        expect(page.locator(".actions").get_by_role("button", name=name)).to_be_visible()
    for part in (location, todo, strip):
        assert low_end(page, part) <= 800
    assert page.locator("h1").bounding_box()["height"] < 40


WHOLE_JOB = {"ranks": [], "hosts": [], "devices": [], "scope": "job"}
SENDER = WHOLE_JOB | {"onset_step": None, "evidence": {"host": "host-7", "what": "rank", "refused": 3}}
NONE_KNOWN = {"impact_gpu_hours_per_hour": 0.0, "suggestion": {}}
OF_KIND = {
    "hang": {},
    "loss_divergence": WHOLE_JOB | {"impact_gpu_hours_per_hour": 16.0},
    "loss_spike": WHOLE_JOB | NONE_KNOWN | {"evidence": {"value": 9.1, "usual": 2.3, "scale": 0.1}},
    "metric": WHOLE_JOB | NONE_KNOWN,
    "checkpoint_overdue": WHOLE_JOB | NONE_KNOWN | {"evidence": {"since_s": 4_000, "usual_s": 600}},
    "checkpoint_failed": NONE_KNOWN | {"evidence": {"error": "No space left on device"}},
    "forged_telemetry": SENDER | NONE_KNOWN,
    "limit_reached": SENDER | NONE_KNOWN,
}


def test_the_page_answers_what_an_engineer_asks_first_also_where_no_rank_or_no_cost_is_known(dashboard):
    dashboard.job("gpt", world_size=16)
    dashboard.attempt("gpt", ranks=[rank(n) for n in range(16)], can=["relaunch"])
    before = [{"what": "tuning: version 4", "step": None, "unix_ns": dashboard.now - 92 * S}]
    for n, (kind, changes) in enumerate(OF_KIND.items()):
        named = {"id": f"inc_{n:032x}", "ranks": [9], "hosts": ["host-1"], "devices": ["GPU-9"]}
        dashboard.incidents(1, **{**named, "job": "gpt", "attempt": "l.0", "kind": kind, "changes_before": before,
                               "onset_unix_ns": dashboard.now - 90 * S, **changes})  # fmt: skip
    for n, kind in enumerate(OF_KIND):
        page = dashboard.goto(f"/incidents/inc_{n:032x}")
        expect(page.locator("h1")).to_contain_text(KINDS[kind].label)
        texts = page.evaluate("""() => ({
          tiles: [...document.querySelectorAll(".strip .tile")].map((one) => one.innerText),
          answers: [...document.querySelectorAll(".answers div")].map((one) => one.innerText),
          steps: document.querySelectorAll(".steps li").length,
        })""")
        where, since, idle, _, goodput, confidence = texts["tiles"]
        usual, bad, cause, changed = texts["answers"]
        assert re.search(r"Where\s+(rank 9\s+host-1|whole job\s+(16 ranks|host-7))", where), (kind, where)
        assert re.search(r"Since\s+1 min", since), (kind, since)
        assert re.search(r"(GPUs idle|GPUs wasted)\s+(\d|none)", idle), (kind, idle)
        assert re.search(r"Goodput\s+\d", goodput), (kind, goodput)
        assert re.search(r"Is it real\?\s+Certain\s+found (at once|after|in step)", confidence), (kind, confidence)
        assert usual.lower().startswith(f"normal\n{normal(kind, {})}".lower()), (kind, usual)
        assert ("usual 10 min" in usual) == (kind == "checkpoint_overdue"), (kind, usual)
        assert bad.lower() == f"impact\n{impact(kind, 'critical', {})}.".lower(), (kind, bad)
        assert changed == "Changed before\nTuning: version 4, 2 s before.", (kind, changed)
        assert cause == "Likely cause\nThe rank itself: its device, process or data.", (kind, cause)
        assert texts["steps"] > 0, kind
        assert low_end(page, page.locator(".answers")) <= 360


def test_a_job_without_gpus_counts_ranks(dashboard):
    dashboard.job("cpu", world_size=2, accelerated=False)
    cpus = [rank(n, device_uuid="", device_type="cpu", host="laptop") for n in range(2)]
    dashboard.attempt("cpu", ranks=cpus, can=[])
    dashboard.incidents(1, job="cpu", kind="hang", attempt="l.0", ranks=[1], hosts=["laptop"], devices=[],
                     impact_gpu_hours_per_hour=2.0)  # fmt: skip
    page = dashboard.goto(f"/incidents/{dashboard.incident_id('critical')}")
    strip = page.locator(".strip")
    expect(strip).to_contain_text("Ranks idle2 of 2")
    expect(strip).to_contain_text("rank-h")
    expect(strip).not_to_contain_text("GPU")


def test_a_hang_tells_where_each_group_of_ranks_stands(dashboard):
    dashboard.job("gpt")
    late = {"rank": 7, "step": 380, "phase": "forward", "phase_age_s": 7.2, "collective_seq": 379, "os_state": "R"}
    stacks = [{"ranks": "6-7", "count": 2, "rank": 7, "stack": "File data.py", "where": "load (data.py:3)"}]
    stacks += [{"ranks": "0-5,8-31", "count": 30, "rank": 0, "stack": "File c10d.py", "where": "x", "os_state": "S"}]
    sentence = "30 of 32 ranks stand in all_reduce (distributed_c10d.py:2810), from train (train.py:41)."
    waits = {"step": 380, "phase": "backward"}
    evidence = {
        "missing": [late],
        "waiting": [waits | {"ranks": 31}, waits | {"step": 379, "ranks": 1}],
        "stacks": stacks,
        "ranks_stand": sentence,
    }
    dashboard.incidents(1, job="gpt", kind="hang", evidence=evidence)
    page = dashboard.goto(f"/incidents/{dashboard.incident_id('critical')}")
    rows = card(page, "Ranks by collective and phase").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_have_text("rank 7379Forward for 7.2 s380Rload (data.py:3)")
    expect(rows.nth(1)).to_have_text("31 ranks wait–Backward380––")
    expect(rows.nth(2)).to_have_text("1 rank waits–Backward379––")
    expect(page.locator(".card", has_text="Where the ranks stand").last).to_contain_text(sentence)
    dumps = page.locator(".card", has=page.locator("pre.dump"))
    expect(dumps).to_have_count(2)
    expect(dumps.nth(0)).to_contain_text("Stack of 2 ranks: 6-7")
    expect(dumps.nth(1)).to_contain_text("rank 0: process state S")


def test_corruption_shows_the_digits_that_differ(dashboard):
    dashboard.job("gpt")
    evidence = {"fingerprints": {"9": "00e9"}, "replicas": {"0": "00eb", "1": "00eb", "3": "00eb"},
                "replicas_compared": 4, "equal_step": 340}  # fmt: skip
    dashboard.incidents(1, job="gpt", kind="corruption", evidence=evidence)
    page = dashboard.goto(f"/incidents/{dashboard.incident_id('critical')}")
    table = card(page, "Fingerprints by replica")
    expect(table.locator("tr.differs")).to_have_text("00e99differs")
    expect(table.locator("mark")).to_have_text("9")
    expect(table.locator("tbody tr").nth(1)).to_have_text("00eb0–1, 3agree")
    expect(table).to_contain_text("4 replicas compared; all equal in step 340.")


def test_an_alert_leads_to_its_query_and_to_no_script(dashboard):
    dashboard.job("gpt")
    query = "https://prometheus.example/graph?g0.expr=1"
    listed = [{"summary": "<b>full</b>", "labels": 'instance="node-1:9100"'}]
    evidence = {"alert": "DiskFull", "url": query, "runbook_url": "javascript:alert(1)", "alerts": listed}
    dashboard.incidents(1, **WHOLE_JOB | NONE_KNOWN | {"job": "gpt", "kind": "alert", "evidence": evidence})
    found = card(dashboard.goto(f"/incidents/{dashboard.incident_id('critical')}"), "Evidence")
    expect(found.get_by_role("link")).to_have_attribute("href", query)
    expect(found).to_contain_text("javascript:alert(1)")
    expect(found).to_contain_text('<b>full</b> · labels instance="node-1:9100"')


def test_nan_shows_the_local_series_of_its_rank_and_the_parameter(visit, site):
    with visit() as one:
        page = one.goto(f"/incidents/{site.incident_id()}")
        chart = page.locator(".kind canvas.line").first
        expect(chart).to_have_attribute("aria-label", re.compile(r"median of all ranks: .*rank 1: .*critical incident"))


def test_who_was_told_is_a_summary_and_an_open_fold_stays_open(visit, site):
    with visit() as one:
        page = one.goto(f"/incidents/{site.incident_id()}")
        reported = card(page, "Notifications")
        expect(reported.locator(".counts")).to_contain_text("delivered")
        expect(reported).to_contain_text("1 receiver")
        reported.get_by_text("Each notification").click()
        expect(reported.locator(".lines")).to_be_visible()
        page.get_by_label("Comment").fill("seen")
        page.get_by_role("button", name="Comment").click()
        expect(page.locator(".timeline")).to_contain_text("seen")
        expect(reported.locator(".lines")).to_be_visible()


@pytest.mark.parametrize(
    ("path", "says", "status"),
    [
        ("/jobs/nojob", "There is no job nojob", 200),
        ("/incidents/nope", "There is no incident nope", 200),
        ("/commands/cmd_999999", "There is no command cmd_999999", 200),
        ("/no/such/page", "There is no page /no/such/page", 404),
    ],
    ids=["job", "incident", "command", "page"],
)
def test_what_does_not_exist_is_said_with_a_way_home(dashboard, path, says, status):
    answer = dashboard.page.goto(dashboard.url + path)
    assert answer.status == status
    expect(dashboard.page.locator("h1")).to_have_text(says)
    dashboard.page.locator(".error-page a").last.click()
    expect(dashboard.page).to_have_url(re.compile("/(incidents|commands)$"))
