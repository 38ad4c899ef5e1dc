"""What all tables share: names of constraints, and the types of columns."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Dialect, Double, Integer, LargeBinary, MetaData, Text
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

# SQLite only auto-increments a column that is INTEGER exactly.
AutoId = BigInteger().with_variant(Integer, "sqlite")


class _AsGiven(UserDefinedType[Any]):
    """SQLite's DOUBLE without conversions by SQLAlchemy, so that the text "NaN" passes."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "DOUBLE"


class Measured(TypeDecorator[float]):
    """A number that may be NaN or infinite. SQLite turns NaN into NULL, so there the text "NaN" is stored."""

    impl = Double
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The column's type in a database."""
        return dialect.type_descriptor(_AsGiven() if dialect.name == "sqlite" else Double())

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """The value to store for a number or its name."""
        number = None if value is None else float(value)
        return "NaN" if number is not None and math.isnan(number) and dialect.name == "sqlite" else number

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:  # noqa: ARG002 - SQLAlchemy's call
        """The stored value as a number."""
        return None if value is None else float(value)


class Base(DeclarativeBase):
    """Declarative base with named constraints, so that migrations can name them on both databases."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger,
        str: Text,
        bytes: LargeBinary,
        dict[str, Any]: JSON,
        list[Any]: JSON,
    }
