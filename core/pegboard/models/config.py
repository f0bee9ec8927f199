"""Reading a model's config.json: typed, with every wrong value named at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pegboard.errors import CheckpointError

ConfigT = TypeVar("ConfigT", bound="ModelConfig")

Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ModelConfig(BaseModel):
    """Fields that a model reads; whatever else a config.json holds is not its business. `null` means the default."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    #: What a field means that is absent, where `null` means something else.
    absent: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with what absent fields mean."""
        return {**cls.absent, **config}

    @classmethod
    def problems(cls, config: Mapping[str, Any]) -> list[str]:
        """What is missing or wrong, by name."""
        try:
            cls.model_validate(_given(cls.complete(config)))
        except ValidationError as error:
            return [_reason(detail["loc"], detail["type"], detail["msg"], detail["input"]) for detail in error.errors()]
        return []

    @classmethod
    def read(cls: type[ConfigT], config: Mapping[str, Any]) -> ConfigT:
        """CheckpointError with all problems."""
        problems = cls.problems(config)
        if problems:
            raise CheckpointError("config.json is not valid:\n  - " + "\n  - ".join(problems))
        return cls.model_validate(_given(cls.complete(config)))


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _reason(where: tuple[int | str, ...], kind: str, message: str, value: Any) -> str:
    name = ".".join(str(part) for part in where)
    if kind == "missing":
        return f"config.json lacks {name!r}"
    return f"{name} is {value!r} in config.json: {message[0].lower()}{message[1:]}"
