"""Metaclass of the parameter classes that users create."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import Code, PenstockError, invalid
from .spelling import did_you_mean


class NamedParameters(msgspec.StructMeta):
    """Metaclass of parameter classes. It refuses an unknown keyword with the nearest known name, and a keyword of
    ``UNSUPPORTED`` (vLLM's, by name; the value says what to do) unless it is None, False or 0."""

    UNSUPPORTED: Mapping[str, str] = {}

    if not TYPE_CHECKING:  # type checkers take the parameters from the fields

        def __call__(cls, *args: Any, **given: Any) -> Any:
            for name in [name for name in given if name not in cls.__struct_fields__]:
                if name not in cls.UNSUPPORTED:
                    hint = did_you_mean(name, cls.__struct_fields__)
                    raise invalid(name, f"is not a parameter of {cls.__name__}{hint}")
                if (value := given.pop(name)) not in (None, False, 0):
                    message = f"{name}: is {value!r:.50}, which is not supported: {cls.UNSUPPORTED[name]}"
                    raise PenstockError(Code.UNSUPPORTED, message, name)
            try:
                return super().__call__(*args, **given)
            except TypeError as error:
                raise invalid(cls.__name__, f"{error}: give its parameters by name") from error
