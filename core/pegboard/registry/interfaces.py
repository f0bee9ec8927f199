"""Which abstract class each role's factory follows, and what of it a given factory lacks."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Final

from ..contracts.attention import AttentionBackend
from ..contracts.cache import CacheManager
from ..contracts.checkpoint import Checkpoint
from ..contracts.executor import Executor
from ..contracts.model import DecoderModel
from ..contracts.observer import Observer
from ..contracts.ops import Ops
from ..contracts.processor import LogitsProcessor
from ..contracts.quantizer import Quantizer
from ..contracts.sampler import Sampler
from ..contracts.scheduler import Scheduler
from ..contracts.speculator import Speculator

INTERFACES: Final[dict[str, type]] = {
    "attention": AttentionBackend,
    "cache": CacheManager,
    "scheduler": Scheduler,
    "sampler": Sampler,
    "logits_processor": LogitsProcessor,
    "quantizer": Quantizer,
    "ops": Ops,
    "model": DecoderModel,
    "checkpoint": Checkpoint,
    "speculator": Speculator,
    "executor": Executor,
    "observer": Observer,
}


def class_methods(role: str) -> tuple[str, ...]:
    """The class methods that the role's contract demands, e.g. refusals and create; others it has itself."""
    interface = INTERFACES[role]
    abstract = interface.__abstractmethods__  # type: ignore[attr-defined]
    return tuple(name for name, value in vars(interface).items() if isinstance(value, classmethod) and name in abstract)


def class_method(role: str, factory: Any, name: str) -> Any:
    """That of `factory`, or the contract's own, which one that does not inherit from it may lack."""
    return getattr(factory, name, None) or getattr(INTERFACES[role], name)


def missing_class_methods(role: str, factory: Any) -> list[str]:
    """Why `factory` can't create a part: class methods, and abstract methods left open. Cheap, done at every load."""
    problems = []
    for name in class_methods(role):
        found = getattr(factory, name, None)
        if not callable(found) or getattr(found, "__isabstractmethod__", False):
            problems.append(f"class method {name} of {INTERFACES[role].__name__} is not implemented")
        elif isinstance(factory, type) and isinstance(inspect.getattr_static(factory, name), FunctionType):
            problems.append(f"{name} must be a class method: mark it @classmethod")
    left = set(getattr(factory, "__abstractmethods__", ())) if isinstance(factory, type) else set()
    left -= set(class_methods(role))  # named already
    problems += [f"{name} of {INTERFACES[role].__name__} is not implemented" for name in sorted(left)]
    return list(dict.fromkeys(problems))


def wrong_signatures(role: str, factory: Any, *, by_name: bool = True) -> list[str]:
    """Methods of `factory` that can't be called as the contract says. Those that it lacks are not looked at. Without
    `by_name`, optional arguments need only be taken by place."""
    problems = []
    for name, contract in sorted(vars(INTERFACES[role]).items()):
        instance = isinstance(contract, FunctionType)
        if name.startswith("_") or not (instance or isinstance(contract, classmethod)):
            continue
        if instance and not isinstance(factory, type):
            continue  # an object that makes parts: only its class methods are known
        found = inspect.getattr_static(factory, name, None)
        if found is not None and not isinstance(found, staticmethod | property):
            problems.extend(_signature_problems(name, getattr(INTERFACES[role], name), getattr(factory, name), by_name))
    return problems


def load_problems(role: str, factory: Any) -> list[str]:
    """Why an engine can't use what `factory` makes, as far as the class tells: what is sure to fail in a step."""
    return missing_class_methods(role, factory) or wrong_signatures(role, factory, by_name=False)


def made_problems(role: str, made: object) -> list[str]:
    """Methods of the role's contract that the object made by a factory lacks."""
    wanted = sorted(INTERFACES[role].__abstractmethods__ - set(class_methods(role)))  # type: ignore[attr-defined]
    return [name for name in wanted if getattr(type(made), name, None) is None and getattr(made, name, None) is None]


def contract_problems(role: str, factory: Any) -> list[str]:
    """Everything in which `factory` falls short of the role's contract, as far as can be seen without running it."""
    problems = missing_class_methods(role, factory)
    if problems:
        return problems
    interface = INTERFACES[role]
    names = set(class_methods(role))
    if isinstance(factory, type):  # else an object that makes parts: only its class methods are known
        names |= set(getattr(interface, "__abstractmethods__", ()))
    for name in sorted(names):
        found = inspect.getattr_static(factory, name, None)
        if found is None or getattr(found, "__isabstractmethod__", False):
            problems.append(f"{name} of {interface.__name__} is not implemented")
    return problems + wrong_signatures(role, factory)


def _signature_problems(name: str, contract: Any, method: Any, optional_by_name: bool) -> list[str]:
    """Whether `method` takes what the contract may pass: required arguments alone, and all, by place or by name."""
    try:
        wanted, offered = inspect.signature(contract), inspect.signature(method)
    except (TypeError, ValueError):
        return []  # compiled: nothing to see
    parameters = list(wanted.parameters.values())
    by_name = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    required = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    optional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty]
    needed_names = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    try:
        offered.bind(*required, **needed_names)
        offered.bind(*required, *optional, **by_name)
        if optional_by_name:
            offered.bind(*required, **dict.fromkeys(optional), **by_name)
    except TypeError as error:
        plain = [p.replace(annotation=p.empty) for p in parameters]
        return [f"{name} can't be called as {name}{inspect.Signature(plain)}: {error}"]
    return []
