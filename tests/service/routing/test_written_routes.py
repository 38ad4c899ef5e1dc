"""Files of routes: what is wrong is reported with its place."""

import pytest

from rankwatch_service.routing.route import Escalation
from rankwatch_service.routing.written_routes import ROUTES_BYTES_MAX, read_routes

ROOT = '[route]\nreceiver = "a"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "route: Field required"),
        ("[route]\n", 'route.receiver: the root needs one; "" notifies nobody'),
        ("[route\n", "line 1"),
        (ROOT + "group_wiat = '1s'", "route.group_wiat: Extra inputs are not permitted"),
        (ROOT + "group_wait = '1'", "route.group_wait: '1' is not a duration"),
        (ROOT + "group_interval = '0s'", "route.group_interval: Input should be greater than 0"),
        (ROOT + "matchers = ['job=gpt']", "route: the root takes every incident, always: it has no matchers"),
        (ROOT + "continue = true", "it has no continue$"),
        (ROOT + "[[route.routes]]\n[[route.routes]]\nmatchers = ['jbo=gpt']",
         r"route.routes\[1\].matchers\[0\]: incidents have no label 'jbo'"),
        (ROOT + "[[route.routes]]\nmatchers = ['job']", r"route.routes\[0\].matchers\[0\]: 'job' is not a matcher"),
        (ROOT + "[[route.routes]]\nmatchers = ['job=~(']", "not a regular expression"),
        (ROOT + "[[route.routes]]\ncontinue = 'yes'", r"route.routes\[0\].continue: Input should be a valid boolean"),
        (ROOT + "group_by = ['colour']", "route.group_by: incidents have no label 'colour'"),
        (ROOT + "group_by = ['job', 'job']", "route.group_by: a label is listed twice"),
        (ROOT + "[[route.routes]]\nmute_time_intervals = ['night']",
         r"route.routes\[0\]: there are no time_intervals called 'night'"),
        (ROOT + "[[time_intervals]]\nname = 'n'\ntime_intervals = [{weekdays = ['moonday']}]",
         r"time_intervals\[0\].time_intervals\[0\]: 'moonday' is not a range"),
        (ROOT + 2 * "[[time_intervals]]\nname = 'n'\ntime_intervals = []\n",
         r"time_intervals\[1\].name: there is another one called 'n'"),
        (ROOT + "[[inhibit_rules]]\nsource_matchers = ['kind=hang']\ntarget_matchers = ['kind=']\nequal = ['jbo']",
         r"inhibit_rules\[0\].equal: incidents have no label 'jbo'"),
        (ROOT + "[[inhibit_rules]]\nsource_matchers = []\ntarget_matchers = ['kind=']",
         r"inhibit_rules\[0\].source_matchers: "),
        (ROOT + "[[route.escalations]]\nafter = '5m'\nreceiver = 'a'",
         "route: an escalation goes to a receiver that the route notifies already"),
        ("# " + "x" * ROUTES_BYTES_MAX, "more than"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_with_its_place(text, told):
    with pytest.raises(ValueError, match=told):
        read_routes(text)


def test_escalations_are_inherited_and_an_empty_list_ends_that():
    root = read_routes(
        """
        [route]
        receiver = "a"
        escalations = [{ after = "15m", receiver = "lead" }]
        routes = [{ matchers = ["job=gpt"] }, { matchers = ["job=bert"], escalations = [] }]
        """
    ).root
    assert [route.escalations for route in root.routes] == [(Escalation(900, "lead"),), ()]


def test_the_receivers_of_a_file_are_those_of_its_routes_and_escalations():
    text = '[route]\nreceiver = ""\nescalations = [{ after = "15m", receiver = "lead" }]\nroutes = [{ receiver = "b" }]'
    assert read_routes(text).receivers() == {"b", "lead"}
