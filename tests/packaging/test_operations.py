"""The operations page says what there is: every setting, metric and limit, with its figure, and nothing else."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from rankwatch.kafka.producer import Producer
from rankwatch.kafka.settings import KafkaSettings
from rankwatch_service.api.kafka_intake import ProducerCollector
from rankwatch_service.settings import Settings
from tests.support.service.api import running_api
from tests.support.service.process import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def section(title: str) -> str:
    """The text between a heading and the next."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_column(title: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)`", section(title), re.MULTILINE)


def test_every_setting_stands_in_the_table_and_nothing_else() -> None:
    assert sorted(first_column("Settings")) == sorted(f"RANKWATCH_{name.upper()}" for name in Settings.model_fields)


@pytest.mark.parametrize(
    ("name", "field"), [(f"RANKWATCH_{name.upper()}", field) for name, field in Settings.model_fields.items()]
)
def test_a_default_that_is_a_plain_value_is_the_one_of_the_page(name: str, field) -> None:
    (row,) = (line for line in section("Settings").splitlines() if line.startswith(f"| `{name}`"))
    default = row.split("|")[2].strip()
    if isinstance(field.default, bool | int) or (isinstance(field.default, str) and field.default):
        assert default == str(field.default).replace("True", "true").replace("False", "false")


def test_every_metric_of_the_real_page_is_explained_and_no_other(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        text = api.get("/metrics").text
    real = re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
    # With Kafka there are those of the producer besides.
    producer = Producer(KafkaSettings(f"127.0.0.1:{free_port()}"))
    real += [family.name for family in ProducerCollector(producer).collect()]
    producer.close(0.0)
    assert sorted(first_column("What each metric means")) == sorted(real)


@pytest.mark.parametrize("row", [line for line in section("Limits").splitlines() if line.startswith("| `")])
def test_a_limit_has_the_figure_and_the_place_that_the_page_gives(row: str) -> None:
    name, figure, place = (part.strip().strip("`") for part in row.split("|")[1:4])
    assert getattr(importlib.import_module(place), name) == int(figure)


def test_metrics_that_are_named_elsewhere_on_the_page_exist() -> None:
    assert set(re.findall(r"rankwatch_[a-z_]+_[a-z]+(?=`)", PAGE)) <= set(first_column("What each metric means")) | {
        "rankwatch_service"
    }
