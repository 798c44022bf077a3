# SPDX-License-Identifier: Apache-2.0
"""What a class of modules asks of the classes below it and of its instances.

Abstract methods and attributes, fields with converters, checks of what a constructor built, and that a final
class stays one. All of it is read when the first instance of a class is made (``@dataclass`` comes after the
class) and looked at while modules are constructed: a call, a flatten and a copy know nothing of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, get_origin

from tether._core import Static, Variable
from tether._core.variable import Cells
from tether._modules.attributes import MISSING, CellAttribute, declare
from tether.errors import DeclarationError

T = TypeVar("T")

if TYPE_CHECKING:
    from typing import ClassVar as AbstractClassVar

    AbstractVar: TypeAlias = Annotated[T, "AbstractVar"]
else:

    class AbstractVar(Generic[T]):
        """Annotates an attribute that a class leaves to those derived from it.

        Whatever makes ``self.name`` readable provides it: an assignment in the constructor, a class attribute, a
        property. A dataclass makes no field of it.

        Raises:
            DeclarationError: it has a value, or a module is made without it.
        Example:
            >>> class Leaky(tether.Module):
            ...     slope: tether.AbstractVar[float]
            ...     def __call__(self, x):
            ...         return jnp.maximum(x, self.slope * x)
            >>> class Half(Leaky):
            ...     def __init__(self):
            ...         self.slope = 0.5
            >>> float(Half()(-2.0))
            -1.0
        """

    class AbstractClassVar(Generic[T]):
        """Annotates a class attribute that a class leaves to those derived from it.

        Raises:
            DeclarationError: it has a value, or a module is made whose class lacks it.
        Example:
            >>> class Activation(tether.Module):
            ...     symbol: tether.AbstractClassVar[str]
            >>> class Identity(Activation):
            ...     symbol = "id"
            >>> Identity().symbol
            'id'
        """


def field(*, converter: Callable[[Any], Any] | None = None, static: bool = False, **kwargs: Any) -> Any:
    """A field of a ``@dataclass`` module whose value is converted or static.

    Args:
        converter: Applied once, to what the field holds when the constructor has returned, ``__post_init__``
            included, unless that is a cell. Later writes keep shape and dtype, and aren't converted.
        static: Whether the value is kept as ``tether.Static`` keeps it, which a hashable setting doesn't need.
        **kwargs: Those of ``dataclasses.field``.
    Example:
        >>> @dataclasses.dataclass
        ... class Scale(tether.Module):
        ...     weight: jax.Array = tether.field(converter=tether.Param)
        >>> Scale(jnp.ones(2)).weight
        Array([1., 1.], dtype=float32)
    """
    converts = {} if converter is None else {"converter": converter}
    metadata = {**kwargs.pop("metadata", {}), **converts, **({"static": True} if static else {})}
    return dataclasses.field(metadata=metadata, **kwargs)


class Contract(NamedTuple):
    """What a class asks of a module that its constructor has built."""

    fields: dict[str, dataclasses.Field[Any]]  # those to convert
    checks: list[Callable[[Any], Any]]  # of the sealed module, in order


def read_class(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
    """Before a class is made: refuses a final base, and notes what is annotated as abstract."""
    for base in bases:
        if vars(base).get("__final__"):
            raise DeclarationError(
                "a final class can't be derived from.",
                at=name,
                got=f"the base {base.__name__}, which is @typing.final",
                expected="a base that is not",
                fix=["hold one of it in an attribute", f"derive from the bases of {base.__name__}"],
            )
    annotations = namespace.get("__annotations__", {})
    abstract = {attribute: mark for attribute, kind in annotations.items() if (mark := _mark(kind))}
    for attribute, mark in abstract.items():
        if attribute in namespace:
            raise DeclarationError(
                "an abstract attribute has a value in the class that declares it.",
                at=f"{name}.{attribute}",
                expected="a value in the classes derived from it alone",
                fix=["leave the value out", f"annotate it without {mark}"],
            )
        annotations[attribute] = ClassVar[annotations[attribute]]  # of which a dataclass makes no field
    namespace |= {"_contract_": None, "_abstract_": abstract}


def _mark(annotation: Any) -> str:
    """The mark of an annotation, or "". It goes by the name: not every scope can evaluate an annotation's string."""
    is_text = isinstance(annotation, str)
    kind = annotation if is_text else getattr(get_origin(annotation) or annotation, "__name__", "")
    name = kind.strip("'\" ").partition("[")[0].rpartition(".")[2]
    return name if name in ("AbstractVar", "AbstractClassVar") else ""


def contract_of(cls: Any) -> Contract:
    """The contract of a class that is abstract in nothing, else an error that names what it lacks."""
    return cls._contract_ or _read_contract(cls)


def _read_contract(cls: Any) -> Contract:
    classes = [vars(base) for base in cls.__mro__]
    declared = {name: mark for own in reversed(classes) for name, mark in own.get("_abstract_", {}).items()}
    lacking = [name for name in declared if not any(_has_value(own, name) for own in classes)]
    of_class = [name for name in lacking if declared[name] == "AbstractClassVar"]
    if cls.__abstractmethods__ or of_class:
        raise _abstract_error(cls, {"methods": sorted(cls.__abstractmethods__), "class attributes": of_class})
    fields = getattr(cls, "__dataclass_fields__", {})
    checks = [functools.partial(_check_assigned, lacking)] if lacking else []
    cls._contract_ = Contract(
        {name: fields[name] for name in fields if fields[name].metadata.keys() & {"converter", "static"}},
        checks + [own["__check_init__"] for own in classes if "__check_init__" in own],
    )
    return cls._contract_


def _has_value(namespace: Any, name: str) -> bool:
    """Whether a class has the attribute, and not only instances that hold a cell in it."""
    value = namespace.get(name, MISSING)
    return value is not MISSING and not (isinstance(value, CellAttribute) and value.default is MISSING)


def _abstract_error(cls: Any, lacking: dict[str, list[str]]) -> DeclarationError:
    names = ", ".join(name for part in lacking.values() for name in part)
    return DeclarationError(
        "an abstract class of modules can't be instantiated.",
        at=cls.__name__,
        got="; ".join(f"abstract {kind}: {', '.join(part)}" for kind, part in lacking.items() if part),
        expected="a class that defines them, itself or by its bases",
        fix=[
            f"define {names} in {cls.__name__}",
            f"instantiate a class derived from {cls.__name__} that defines {names}",
        ],
    )


def convert(module: Any, contract: Contract) -> None:
    """Converts the fields of a module whose own constructor has returned."""
    for name, field in contract.fields.items():
        value = vars(module).get(name, field.default)
        if value is dataclasses.MISSING or isinstance(value, Variable | Cells | Static):
            continue
        if "converter" in field.metadata:
            value = field.metadata["converter"](value)
        declare(module, name, Static(value) if field.metadata.get("static") else value)


def _check_assigned(names: list[str], module: Any) -> None:
    """Whether a constructor has assigned the abstract attributes that the class itself doesn't have."""
    missing = [name for name in names if name not in vars(module)]
    if missing:
        raise DeclarationError(
            "a constructor left abstract attributes unassigned.",
            at=type(module).__name__,
            got=f"a module without {', '.join(missing)}",
            expected="an assignment in __init__, a class attribute or a property",
            fix=[f"self.{missing[0]} = ... in its __init__", f"{missing[0]} = ... in its class"],
        )
