"""Functions of the user's own, named "package.module:function" or "path/file.py:function"."""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from relax.errors import ConfigError, FunctionError, one_line
from relax.flags import nearest

Kind = Literal["plain", "async"]
FORMS = "'package.module:function' or 'path/file.py:function' is needed"


def load_function(
    path: str,
    *,
    flag: str,
    signature: tuple[str, ...],
    kind: Kind = "plain",
    known: str | None = None,
    copy: Path | None = None,
) -> Callable[..., Any]:
    """Import a function and check that it takes the parameters of signature, in this order.

    flag is the setting that names the function, for the error; what it raises when it is called is
    a FunctionError. Further parameters of the function need defaults. known is the identity that
    it must have; copy, where there is such a file, is read in place of the file that path names.
    Raises ConfigError when it cannot be imported, is another or takes other parameters.
    """
    source, name = split(path, flag)
    if copy is not None and copy.is_file():
        file, text = Path(source).resolve(), copy.read_bytes()
    else:
        file = source_file(path, flag=flag)
        text = file.read_bytes()
    if known is not None and identity_of(text, name) != known:
        raise ConfigError(
            f"{flag} = {path!r}: {file} changed since the run began; put it back as it was, or "
            "give another --run-dir"
        )
    module = load_module(path, file, text, flag=flag)
    function = vars(module).get(name)
    if not callable(function):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        hint = nearest(name, functions) or f"; it has: {', '.join(functions) or 'none'}"
        raise ConfigError(f"{flag} = {path!r}: no function {name!r} there{hint}")
    check_signature(function, signature, kind, f"{flag} = {path!r}")
    return function if kind == "async" else guarded(function, file, f"{flag} = {path!r}")


def guarded(function: Callable[..., Any], file: Path, where: str) -> Callable[..., Any]:
    """The function, whose failures become a FunctionError that shows the frames of file alone."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, SystemExit) as error:  # it may fail in any way; told, never swallowed
            told = f"{type(error).__name__}: {one_line(error)}"
            frames = traceback.extract_tb(error.__traceback__)
            own = [
                number
                for number, frame in enumerate(frames)
                if Path(frame.filename).resolve() == file
            ]
            line = f" ({file.name}:{frames[own[-1]].lineno})" if own else ""
            shown = "".join(traceback.format_list(frames[own[0] :])) if own else ""
            raise FunctionError(f"{where}: {told}{line}", shown + told) from None

    return call


def check_source(path: str, *, flag: str, signature: tuple[str, ...], kind: Kind = "plain") -> None:
    """Check a function's parameters by reading its source: nothing is imported or run.

    For a flow, which must not load what the user's file loads. A function that is not written as
    a plain `def` in the file is left to load_function. Raises ConfigError like it.
    """
    name = split(path, flag)[1]
    file = source_file(path, flag=flag)
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} = {path!r}: {file} is not Python: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            check_signature(_stand_in(node), signature, kind, f"{flag} = {path!r}")


def _stand_in(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Callable[..., Any]:
    """An empty function with the parameters of a definition; its defaults are all None."""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    bare = ast.parse(f"{word} {node.name}(): pass")
    function = bare.body[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    function.args = node.args
    for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    for variadic in (node.args.vararg, node.args.kwarg):
        if variadic is not None:
            variadic.annotation = None
    node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    node.args.kw_defaults = [d and ast.Constant(None) for d in node.args.kw_defaults]
    space: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(bare), node.name, "exec"), space)
    return space[node.name]


def source_file(path: str, *, flag: str) -> Path:
    """Give the file that holds the function, without running it. ConfigError when there is none."""
    source = split(path, flag)[0]
    if source.endswith(".py"):
        file = Path(source)
        if not file.is_file():
            raise ConfigError(f"{flag} = {path!r}: no file {file}; {FORMS}")
        return file.resolve()
    try:
        spec = importlib.util.find_spec(source)
    except (ImportError, ValueError):  # a parent package is missing, or the name is not one
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(
            f"{flag} = {path!r}: no Python module {source!r} on the import path; {FORMS}"
        )
    return Path(spec.origin).resolve()


def split(path: str, flag: str) -> tuple[str, str]:
    """Split "source:function" at the last colon."""
    source, _, name = path.rpartition(":")
    if not source or not name.isidentifier():
        raise ConfigError(f"{flag} = {path!r}; {FORMS}")
    return source, name


def load_module(path: str, file: Path, text: bytes, *, flag: str) -> ModuleType:
    """Import the module that path names, or run the file's text, once in a process."""
    source = split(path, flag)[0]
    try:
        return load_file(file, text) if source.endswith(".py") else importlib.import_module(source)
    except (Exception, SystemExit) as error:  # it may fail in any way; all are one line for users
        raise ConfigError(
            f"{flag} = {path!r}: importing {file} failed: {type(error).__name__}: {one_line(error)}"
        ) from error


def load_file(file: Path, text: bytes) -> ModuleType:
    """Run the text of a Python file as a module of its own, named after both."""
    name = f"relax_custom_{file.stem}_{hashlib.sha256(text).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by name while it runs.
    sys.modules[name] = module
    try:
        exec(compile(text, file, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_signature(
    function: Callable[..., Any], signature: tuple[str, ...], kind: Kind, where: str
) -> None:
    """Raise ConfigError unless the leading parameters have these names and the rest defaults."""
    if kind == "plain" and inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: async is not supported here; write a plain `def`")
    if kind == "async" and not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: not an async function; write `async def`")
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    leading = tuple(p.name for p in parameters[: len(signature)] if p.kind in positional)
    rest = parameters[len(signature) :]
    required = [p.name for p in rest if p.default is p.empty and p.kind not in variadic]
    if leading != signature or required:
        raise ConfigError(
            f"{where}: takes ({', '.join(p.name for p in parameters)}); "
            f"({', '.join(signature)}) is needed, by these names; further parameters with defaults"
        )


def identity(path: str, *, flag: str) -> str:
    """What a function is known by in keys: its file's source and its own name, never its path."""
    return identity_of(source_file(path, flag=flag).read_bytes(), split(path, flag)[1])


def identity_of(text: bytes, name: str) -> str:
    """The identity of the function called name in a file of this text."""
    return f"{hashlib.sha256(text).hexdigest()}:{name}"
