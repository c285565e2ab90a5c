"""How an error of `errors` gets its text out of its fields."""

from collections.abc import Callable
from typing import TypeVar, dataclass_transform

_Error = TypeVar("_Error", bound=Exception)


@dataclass_transform(eq_default=False)
def says(text: str) -> Callable[[type[_Error]], type[_Error]]:
    """The arguments of the error are its fields, in their order; `{it.…}` in the text is a property."""

    def with_fields(error: type[_Error]) -> type[_Error]:
        names = [name for kind in reversed(error.__mro__) for name in vars(kind).get("__annotations__", ())]

        def fill(self: _Error, *given: object, **named: object) -> None:
            vars(self).update(zip(names, given, strict=False), **named)  # what is left has a default
            values = {name: getattr(self, name) for name in names}
            lists = {
                name: ", ".join(map(str, it[:20])) or "none" for name, it in values.items() if isinstance(it, list)
            }
            Exception.__init__(self, " ".join(text.split()).format(it=self, **(values | lists)))

        error.__init__ = fill  # type: ignore[method-assign, assignment]
        return error

    return with_fields
