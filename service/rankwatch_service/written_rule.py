"""A rule on a metric as people write it: in TOML, and in requests. All its errors are found here."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from rankwatch.wire import METRIC_NAME_BYTES_MAX
from rankwatch_detectors.base import Severity
from rankwatch_detectors.metric_rule import Condition, Direction, MetricRule

RULES_MAX: Final = 200
"""Rules of one service. All are in each record of the control log that changes any: 100 KB."""

HOLD_S_MAX: Final = 30 * 86_400.0
PATTERNS_MAX: Final = 20

Pattern = Annotated[str, Field(min_length=1, max_length=200)]


class WrittenRule(BaseModel):
    """A rule on a metric that jobs log."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    metric: Annotated[str, Field(min_length=1, max_length=METRIC_NAME_BYTES_MAX + len("phase."))]
    when: Condition
    value: Annotated[float | None, Field(strict=True, allow_inf_nan=False)] = None
    """above, below: the threshold. peers: the ratio to the median of the ranks that do the same work."""
    hold_s: Annotated[float, Field(strict=True, ge=0, le=HOLD_S_MAX)] = 0.0
    """Seconds for which it must be so before an incident opens, and over before it ends."""
    severity: Severity = Severity.WARNING
    each_rank: StrictBool = False
    """above, below: judge and name each rank, instead of the median over ranks."""
    direction: Direction = Direction.BOTH
    """change: which changes count."""
    jobs: Annotated[list[Pattern], Field(max_length=PATTERNS_MAX)] = []
    """Patterns of job names, of which one must match: `*` any text, `?` one character. Empty: all jobs."""

    @model_validator(mode="after")
    def _is_whole(self) -> WrittenRule:
        bounded = self.when in (Condition.ABOVE, Condition.BELOW)
        if bounded and self.value is None:
            raise ValueError(f"when = {self.when} needs a value, the threshold")
        if self.when is Condition.PEERS and (self.value is None or self.value <= 0 or self.value == 1):
            raise ValueError("when = peers needs a value, the ratio: above 0, and not 1")
        if self.when in (Condition.ABSENT, Condition.CHANGE) and self.value is not None:
            raise ValueError(f"when = {self.when} takes no value")
        if self.when is Condition.ABSENT and self.hold_s <= 0:
            raise ValueError("when = absent needs hold_s, the seconds without a value")
        if self.each_rank and not bounded:
            raise ValueError("each_rank is for above and below only")
        if self.direction is not Direction.BOTH and self.when is not Condition.CHANGE:
            raise ValueError("direction is for change only")
        return self

    def rule(self) -> MetricRule:
        """As detectors get it."""
        return MetricRule(
            name=self.name,
            metric=self.metric,
            when=self.when,
            value=self.value or 0.0,
            hold_s=self.hold_s,
            severity=str(self.severity),
            each_rank=self.each_rank,
            direction=self.direction,
            jobs=tuple(self.jobs),
        )

    @classmethod
    def of(cls, rule: MetricRule) -> WrittenRule:
        """As people would have written it."""
        bounded = rule.when in (Condition.ABOVE, Condition.BELOW, Condition.PEERS)
        return cls.model_validate(rule.fields() | {"value": rule.value if bounded else None})


def read_toml(text: str) -> list[WrittenRule]:
    """The rules of a TOML document: its tables `[[rule]]`.

    Raises:
        ValueError: it is not TOML, or a rule is wrong; the text names the rule and the field.
    """
    document = tomllib.loads(text)
    if unknown := document.keys() - {"rule"}:
        raise ValueError(f"there is no table {sorted(unknown)[0]!r}; rules are tables [[rule]]")
    tables = document.get("rule", [])
    if not isinstance(tables, list):
        raise ValueError("write [[rule]], with two brackets: there may be several")  # noqa: TRY004 - the user's
    rules = [_checked(number, table) for number, table in enumerate(tables, 1)]
    check_together(rules)
    return rules


def check_together(rules: Sequence[WrittenRule]) -> None:
    """Check what concerns several rules.

    Raises:
        ValueError: there are too many, or two have one name.
    """
    if len(rules) > RULES_MAX:
        raise ValueError(f"the limit is {RULES_MAX} rules, not {len(rules)}")
    names = [rule.name for rule in rules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two rules have the name {twice!r}")


def _checked(number: int, table: Any) -> WrittenRule:
    name = table.get("name", "") if isinstance(table, dict) else ""
    try:
        return WrittenRule.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        what = f"{where}: {first['msg']}" if where else str(first["msg"]).removeprefix("Value error, ")
        raise ValueError(f"rule {number}{f' ({name})' if name else ''}: {what}") from error
