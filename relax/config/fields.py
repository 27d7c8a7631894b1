"""What the sections of the configuration are made of: bounded types, unkeyed fields, the base."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Ints = Annotated[tuple[int, ...], Field(strict=False)]
Placement = Literal["inline", "job"]

Fault = tuple[tuple[str, ...], str]
"""The settings that do not fit each other, and the line that says so."""

UNKEYED: dict[str, Any] = {"keyed": False}


def unkeyed(default: Any = ...) -> Any:
    """A field that says where or how, never what: no artifact's key contains it."""
    return Field(default, json_schema_extra=UNKEYED)


def told(info: ValidationInfo, faults: Iterable[Fault]) -> None:
    """Raise ValueError with a line for each fault.

    Less those of settings that are `faulty` by themselves, of which defaults stand in the tree.
    """
    faulty = (info.context or {}).get("faulty", frozenset())
    if lines := [line for names, line in faults if faulty.isdisjoint(names)]:
        raise ValueError("\n".join(lines))


class Section(BaseModel):
    """A node of the tree: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    def keyed(self) -> dict[str, Any]:
        """The fields that decide what an artifact contains."""
        extras = {name: f.json_schema_extra for name, f in type(self).model_fields.items()}
        return {n: v for n, v in self.model_dump(mode="json").items() if extras[n] != UNKEYED}
