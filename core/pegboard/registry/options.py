"""Validation of plain mappings against pydantic models, with every problem named by its path and nearest valid key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)


def nearest(name: str, valid: Iterable[str]) -> str:
    """'; did you mean X?' when a valid name resembles `name`, else ''."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Names for a message: sorted, or 'none'."""
    return ", ".join(sorted(names)) or "none"


def validate(model: type[ModelT], values: Mapping[str, Any], where: str) -> ModelT:
    """`model` built from `values`. ConfigError with one reason a problem, each under the path `where`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        subject = where or "config"
        raise ConfigError(f"{subject} is not valid", reasons_of(error, model, where)) from None


def reasons_of(error: ValidationError, model: type[BaseModel], where: str) -> list[str]:
    """Each problem as 'path: what is wrong, what would be right'."""
    reasons = []
    for problem in error.errors(include_url=False):
        loc = problem["loc"]
        path = dotted(where, loc) or "config"
        match problem["type"]:
            case "extra_forbidden":
                valid = _fields_at(model, loc[:-1])
                hint = nearest(str(loc[-1]), valid)
                into = "; what is the part's own goes into options" if set(valid) == {"use", "options"} else ""
                reasons.append(f"{path}: unknown key{hint or f'; valid keys: {listed(valid)}{into}'}")
            case "missing":
                reasons.append(f"{path}: required, but not given")
            case "value_error":
                reasons.append(f"{path}: {problem['ctx']['error']}")
            case _:
                message = problem["msg"][:1].lower() + problem["msg"][1:]
                reasons.append(f"{path}: {message}, got {_shown(problem['input'])}")
    return reasons


def dotted(where: str, loc: Sequence[str | int]) -> str:
    """('observers', 0, 'use') -> 'observers[0].use', below `where`."""
    path = where
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path


def _fields_at(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """Names that are valid at `loc` inside `model`."""
    for step in loc:
        if isinstance(step, int):
            continue
        field = model.model_fields.get(step)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Model`, `Model | None`, `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _model_in(argument))), None)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
