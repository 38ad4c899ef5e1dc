"""The agent's log is read by machines: each line is one JSON object, whatever is written."""

import json
import logging

from rankwatch.log_lines import JsonLines


def line(message: str, *args: object, exc_info: object = None) -> str:
    record = logging.LogRecord("rankwatch.agent.sender", logging.WARNING, __file__, 1, message, args, exc_info)
    record.created = 1_800_000_000.25
    return JsonLines("agent").format(record)


def test_a_line_has_the_fields_of_the_services_log():
    assert json.loads(line("refused: %s", "status 413")) == {
        "role": "agent",
        "logger": "rankwatch.agent.sender",
        "event": "refused: status 413",
        "level": "warning",
        "timestamp": "2027-01-15T08:00:00.250000Z",
    }


def test_quotes_line_ends_and_tracebacks_stay_within_their_line():
    error = OSError('no "space"\nleft')
    written = line("spool ü", exc_info=(OSError, error, None))
    assert "\n" not in written
    assert json.loads(written)["event"] == "spool ü"
    assert 'OSError: no "space"\nleft' in json.loads(written)["exception"]
