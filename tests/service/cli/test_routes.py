"""Routes on the command line: a file is checked, and tried with the labels of an incident."""

import json

ROUTES = """
[route]
receiver = "on-call"
group_by = ["job", "kind"]
escalations = [{ after = "15m", receiver = "lead" }]

[[route.routes]]
matchers = ['severity="info"']
receiver = ""

[[route.routes]]
matchers = ['project="nlp"']
receiver = "nlp"
group_wait = "1m"
continue = true
"""


def written(tmp_path, text=ROUTES):
    path = tmp_path / "routes.toml"
    path.write_text(text)
    return str(path)


def test_a_file_is_checked(terminal, tmp_path):
    path = written(tmp_path)
    hint = "whether the service has these receivers was not checked; --receivers asks it\n"
    assert terminal.run("routes", "check", path) == (0, "", f"{path}: 3 routes to lead, nlp, on-call\n{hint}")
    nobody = written(tmp_path, '[route]\nreceiver = ""\n')
    assert terminal.run("routes", "check", nobody) == (0, "", f"{nobody}: 1 route to nobody\n")


def test_what_is_wrong_with_a_file_is_one_line_with_its_place(terminal, tmp_path):
    path = written(tmp_path, ROUTES.replace("1m", "soon"))
    status, out, err = terminal.run("routes", "check", path)
    assert (status, out) == (2, "")
    assert f"{path}: route.routes[1].group_wait: 'soon' is not a duration such as 30s" in err
    assert terminal.run("routes", "check", str(tmp_path / "none.toml"))[0] == 2


def test_a_file_is_tried_with_the_labels_of_an_incident(terminal, tmp_path):
    path = written(tmp_path)
    labels = ("--label", "project=nlp", "--label", "kind=hang", "--label", "job=gpt")
    (found,) = map(json.loads, terminal.run("routes", "test", path, *labels, "--json")[1].splitlines())
    assert (found["receiver"], found["route"]) == ("nlp", '{}/{project="nlp"}')
    assert found["group"] == '{}/{project="nlp"}:{job="gpt", kind="hang"}'
    assert (found["group_wait_s"], found["escalations"]) == (60, [{"after_s": 900, "receiver": "lead"}])
    table = terminal.run("routes", "test", path, *labels)[1]
    assert "nlp" in table
    assert "lead after 900 s" in table
    assert "(nobody)" in terminal.run("routes", "test", path, "--label", "severity=info")[1]


def test_a_label_that_no_incident_has_is_refused(terminal, tmp_path):
    status, _, err = terminal.run("routes", "test", written(tmp_path), "--label", "colour=red")
    assert status == 2
    assert "incidents have no label 'colour'" in err
    assert "is not a label such as" in terminal.run("routes", "test", written(tmp_path), "--label", "colour")[2]
