"""Requests to complete a Python function: signatures and docstrings of the standard library.

The functions are those of the interpreter that runs, so another version of Python has others. A
body is never shown.
"""

from __future__ import annotations

import ast
import functools
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_MAX_DOCSTRING, _MIN_DOCSTRING = 900, 25

_WORDINGS = (
    "Complete the following Python function.\n\n{code}",
    "Complete the following Python function:\n\n{fenced}",
    "Complete this function:\n\n{fenced}",
    "Implement this Python function according to its docstring.\n\n{fenced}",
    "Write the body of this function.\n\n{code}",
    "Fill in the implementation:\n\n{fenced}",
    "Here is the signature and docstring of a Python function. Write its body.\n\n{code}",
    "Please finish this Python code:\n\n{code}",
    "{code}\n\nComplete the function above.",
    "{fenced}\n\nImplement it in Python. Only show the code.",
    "Given the docstring below, write the complete Python function.\n\n{fenced}",
    "I have started a Python function. Can you complete it for me?\n\n{code}",
    "Write the Python function `{name}` as its docstring describes:\n\n{fenced}",
    "Finish the implementation of `{name}`. Return the whole function.\n\n{code}",
    "Complete the Python code below and explain briefly how it works.\n\n{fenced}",
    "You are an expert Python programmer. Complete the function.\n\n{code}",
    "Continue this code:\n\n{code}",
    "Read the docstring and provide an implementation.\n\n{fenced}",
)


def texts(rng: random.Random) -> Iterator[str]:
    """Every function in a random order and wording; then all of them again in other wordings."""
    found = list(stdlib_functions())
    rng.shuffle(found)
    orders = [rng.sample(_WORDINGS, len(_WORDINGS)) for _ in found]
    for turn in range(len(_WORDINGS)):
        for (name, code), order in zip(found, orders, strict=True):
            yield order[turn].format(name=name, code=code, fenced=f"```python\n{code}\n```")


@functools.cache
def stdlib_functions() -> tuple[tuple[str, str], ...]:
    """(name, header with docstring) of the functions and methods of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return tuple(
        found
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED.intersection(path.relative_to(root).parts)
        for found in functions(path.read_text(encoding="utf-8", errors="replace"))
    )


def functions(source: str) -> Iterator[tuple[str, str]]:
    """(name, header with docstring) of the functions of a file that have a fitting docstring.

    A file that this Python cannot parse has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # old escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and (code := _header(inner)):
                    body = "\n".join("    " + line if line else "" for line in code.splitlines())
                    yield inner.name, f"class {node.name}:\n{body}"
        elif isinstance(node, ast.FunctionDef) and (code := _header(node)):
            yield node.name, code


def _header(function: ast.FunctionDef) -> str | None:
    """Signature and docstring in the usual layout; None where there is no fitting docstring, or
    nothing but it."""
    text = ast.get_docstring(function)
    if text is None or len(function.body) < 2 or function.name.startswith("_"):
        return None
    if not _MIN_DOCSTRING <= len(text) <= _MAX_DOCSTRING or '"""' in text or "\\" in text:
        return None
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    signature = f"def {function.name}({ast.unparse(function.args)}){returns}:"
    lines = [line and f"    {line}" for line in text.splitlines()]
    end = '"""' if len(lines) == 1 else '\n    """'
    return f'{signature}\n    """{lines[0].strip()}' + "".join(f"\n{x}" for x in lines[1:]) + end
