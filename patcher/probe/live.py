"""Level ``import``: is the code that runs the code that the patched files hold?

Bytecode may be stale (or unchecked, and then stale for ever), another copy may shadow the patched one, and another
package may have replaced a method at import. Each is found by compiling the file again and comparing code objects.
"""

from __future__ import annotations

import importlib
import inspect
import os
import types
from collections.abc import Iterator
from typing import Any


class StaleError(Exception):
    """The interpreter runs other code than the patched file holds; the message names both."""


# The live objects of each role that carry the patch. ``None``: every function and class of the module.
_CARRIERS: dict[str, tuple[str, ...] | None] = {
    "server_args": ("ServerArgs.__post_init__", "ServerArgs.add_cli_args"),
    "eagle_worker": ("EAGLEWorker.__init__", "EAGLEWorker.forward_batch_generation"),
    "eagle_worker_v2": ("EAGLEWorkerV2.__init__", "EAGLEWorkerV2.forward_batch_generation"),
    "spec_switch": None,
}


def check_package(expected: str) -> Any:
    """Imports ``sglang`` and returns it; it must be the package directory ``expected``."""
    package = importlib.import_module("sglang")
    found = [os.path.realpath(p) for p in package.__path__]
    if found != [os.path.realpath(expected)]:
        raise StaleError(
            f"the patched sglang is {expected}, but this interpreter, started in {os.getcwd()}, imports "
            f"{' and '.join(found) or 'a package without a directory'}"
        )
    return package


def module_name(path: str) -> str:
    """``srt/server_args.py`` -> ``sglang.srt.server_args``."""
    return "sglang." + path.removesuffix(".py").replace("/", ".")


def check_module(package: str, role: str, path: str) -> Any:
    """Imports the module of a patched file and compares it, whole, with the file. Returns the module."""
    name, file = module_name(path), os.path.join(package, path)
    module = importlib.import_module(name)
    ran_from = getattr(module, "__file__", None)
    if ran_from is None or os.path.realpath(ran_from) != os.path.realpath(file):
        raise StaleError(f"module {name} was loaded from {ran_from}, not from the patched {file}")
    disk = _compiled(file)
    spec: Any = module.__spec__
    loaded = spec.loader.get_code(name) if hasattr(spec.loader, "get_code") else None
    if loaded is not None and _key(loaded) != _key(disk):
        raise StaleError(
            f"Python runs bytecode of {name} ({spec.cached}) that is not what {file} says; "
            "delete that .pyc and start again"
        )
    check_live(package, role, path, module)
    return module


def check_live(package: str, role: str, path: str, module: Any) -> None:
    """Compares the live functions that carry the patch with the file. Cheap; may be asked again later."""
    file = os.path.join(package, path)
    disk = dict(_functions(_compiled(file)))
    carriers = _CARRIERS.get(role)
    if carriers is None:
        carriers = tuple(_live_names(module, disk))
    for name in carriers:
        if name not in disk:
            continue  # the source level has an opinion on that
        owner: Any = module
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part, None)
            if not (
                isinstance(owner, type) and owner.__module__ == module.__name__ and owner.__name__ == part
            ):
                raise StaleError(
                    f"{module.__name__}.{part} is now {owner!r}, not the class that {file} defines"
                )
        found = vars(owner).get(name.rsplit(".", 1)[-1])
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        live = inspect.unwrap(found) if callable(found) else found
        code = getattr(live, "__code__", None)
        if not isinstance(code, types.CodeType) or _key(code) != _key(disk[name]):
            source = (
                f"{code.co_filename}:{code.co_firstlineno}"
                if isinstance(code, types.CodeType)
                else repr(live)
            )
            raise StaleError(f"{module.__name__}.{name} that runs (from {source}) is not what {file} holds")


def _live_names(module: Any, disk: dict[str, types.CodeType]) -> Iterator[str]:
    for name in disk:
        holder = vars(module).get(name.split(".")[0])
        if name.count(".") == 0:
            if not (callable(holder) and disk[name].co_name == name) or isinstance(holder, type):
                continue
            yield name
        elif name.count(".") == 1 and isinstance(holder, type) and not _generated(holder, name):
            yield name


def _generated(holder: type, name: str) -> bool:
    """Whether the attribute is wrapped beyond recognition (a property, for one): the whole-module check covers it."""
    found = vars(holder).get(name.rsplit(".", 1)[-1])
    return not isinstance(found, (types.FunctionType, staticmethod, classmethod))


def _compiled(file: str) -> types.CodeType:
    with open(file, "rb") as stream:
        return compile(stream.read(), file, "exec", dont_inherit=True)


def _functions(code: types.CodeType, prefix: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """Top-level functions, and methods of top-level classes, by dotted name. Class bodies themselves are left out."""
    for const in code.co_consts:
        if not isinstance(const, types.CodeType) or const.co_name.startswith("<"):
            continue
        # A function's code takes its own locals (CO_OPTIMIZED); a class body's does not.
        if const.co_flags & inspect.CO_OPTIMIZED:
            yield prefix + const.co_name, const
        elif not prefix:
            yield from _functions(const, const.co_name + ".")


def _key(code: types.CodeType) -> tuple[Any, ...]:
    """Everything of a code object that decides what it does; file names and line numbers are not in it."""
    return (
        code.co_name,
        code.co_code,
        tuple(_key(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts),
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        getattr(code, "co_exceptiontable", b""),
    )


def _constant(value: Any) -> Any:
    """Hashing and ordering aside: 1, 1.0 and True are different constants, and a frozenset has no order."""
    if isinstance(value, tuple):
        return tuple(_constant(v) for v in value)
    if isinstance(value, frozenset):
        return frozenset((type(v).__name__, repr(v)) for v in value)
    return type(value).__name__, repr(value)
