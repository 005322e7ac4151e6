"""Options of an estimator by name, as in scikit-learn; shared by calibrators and decision rules."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from typing import Any, Self

from tcil.foundation.errors import unknown_name


class Parameterised:
    """A dataclass whose fields are options: `get_params`, `set_params`, `clone`, and a `repr` of changed options."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check_options_are_fields(cls)
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]  # dataclass() would write another one

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The options by name, as in scikit-learn.

        Parameters
        ----------
        deep : bool
            Ignored; accepted for compatibility with scikit-learn.

        Returns
        -------
        dict
            Value of each option, by name.
        """
        return {field.name: getattr(self, field.name) for field in _fields(self) if field.init}

    def set_params(self, **options: Any) -> Self:
        """Change options by name. They take effect at the next `fit`; if one is invalid, none is changed.

        Parameters
        ----------
        **options
            Options of the constructor.

        Returns
        -------
        Self
            This estimator.
        """
        current = self.get_params()
        for name in options:
            if name not in current:
                raise unknown_name(f"option of {type(self).__name__}", name, current)
        checked = type(self)(**{**current, **options})
        for name in current:
            setattr(self, name, getattr(checked, name))
        return self

    def clone(self) -> Self:
        """A new, unfitted estimator with the same options; `sklearn.base.clone` returns the same.

        Returns
        -------
        Self
            A new estimator.
        """
        return type(self)(**self.get_params())

    def __sklearn_is_fitted__(self) -> bool:
        """Whether `fit` has been called: what `check_is_fitted` of scikit-learn asks for."""
        return getattr(self, "_state", None) is not None

    def __sklearn_tags__(self) -> Any:
        """The usual tags of an estimator. Only scikit-learn asks for them, which is imported only then."""
        return importlib.import_module("sklearn.base").BaseEstimator().__sklearn_tags__()

    def __repr__(self) -> str:
        defaults = {field.name: _default(field) for field in _fields(self)}
        changed = {name: value for name, value in self.get_params().items() if value != defaults[name]}
        shown = (f"{name}={str(value) if isinstance(value, str) else value!r}" for name, value in changed.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def _check_options(self) -> None:
        """Check the options as the constructor does, since they may have been reassigned; `fit` calls it first."""
        checked = copy.copy(self)
        checked.__post_init__()  # type: ignore[attr-defined]  # every estimator has one
        for field in _fields(self):
            setattr(self, field.name, getattr(checked, field.name))


def _fields(estimator: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(estimator)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _check_options_are_fields(kind: type[Parameterised]) -> None:
    """Refuse an `__init__` whose options `get_params`, `clone`, `save` and `load` would not know."""
    if "__init__" not in vars(kind) or kind.get_params is not Parameterised.get_params:
        return  # the __init__ of a dataclass is added later; scikit-learn's get_params reads the signature
    known = {name for base in kind.__mro__ for name in inspect.get_annotations(base)}
    taken = list(inspect.signature(vars(kind)["__init__"]).parameters.values())[1:]
    unknown = [one.name for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    unknown = [name for name in unknown if name not in known]
    if unknown:
        raise TypeError(
            f"{kind.__name__}: got an __init__ with the options {', '.join(unknown)}; expected fields of a dataclass,"
            f" such as '{unknown[0]}: float = 0.01' under @dataclass(eq=False, kw_only=True), which save knows."
        )
