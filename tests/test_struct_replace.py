"""`msgspec.structs.replace` takes any keyword, and mypy does not check them."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import msgspec

import tidemark


def struct_fields() -> set[str]:
    """The names of the fields of all structs of the package."""
    names: set[str] = set()
    for module in pkgutil.walk_packages(tidemark.__path__, "tidemark."):
        if not module.name.endswith("__main__"):
            for item in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(item) and issubclass(item, msgspec.Struct):
                    names |= {*item.__struct_fields__}
    return names


def test_replaced_fields_exist() -> None:
    """A field that was renamed is found, unless another struct has a field of the old name."""
    names, checked = struct_fields(), 0
    for path in Path(tidemark.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("structs.replace"):
                for keyword in node.keywords:
                    assert keyword.arg in names, f"{path}:{node.lineno}: no struct has a field {keyword.arg}"
                    checked += 1
    assert checked
