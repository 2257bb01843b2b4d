"""What fla-core says of itself, read from its files: importing it takes seconds, and its kernels want a driver."""

from __future__ import annotations

import ast
import importlib.util
import re
from importlib.metadata import distributions
from inspect import Parameter
from pathlib import Path

import torch

PINNED = "0.6.0"
FAMILIES = (
    "delta_rule", "gated_delta_rule", "gla", "gsa", "hgrn", "kda", "lightning_attn", "linear_attn", "retention",
    "rwkv6", "simple_gla",
)  # fmt: skip


# Apart from the environment: where fla is installed, transformers calls its kernels, on CPUs too, and they fail.
PEERS = Path(__file__).parents[3] / "build" / "peers"


def _folder() -> Path | None:
    found = [one.version for one in distributions(path=[str(PEERS)]) if one.metadata["Name"] == "fla-core"]
    return PEERS / "fla" / "ops" if found == [PINNED] else None


OPS = _folder()
MISSING = f"fla-core {PINNED} is not in {PEERS}: `make setup` puts it there"


def naive(family, module="naive"):
    """The module of a family's naive functions, which needs nothing else of FLA."""
    spec = importlib.util.spec_from_file_location(f"fla_{family}_{module}", OPS / family / f"{module}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def function(family, module, name):
    """One function of a module that needs the rest of FLA: it must know nothing but torch and its functional."""
    source = (OPS / family / f"{module}.py").read_text()
    (definition,) = (x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef) and x.name == name)
    known = {"torch": torch, "F": torch.nn.functional}
    exec(ast.get_source_segment(source, definition), known)
    return known[name]


class Declared:
    """A function as its file declares it: ``(name, kind, default)`` of its parameters, and what it reads of its
    keywords, or None if it takes none."""

    def __init__(self, definition: ast.FunctionDef, source: str):
        arguments = definition.args
        assert not [*arguments.posonlyargs, *arguments.kwonlyargs, *filter(None, [arguments.vararg])]
        missing = [Parameter.empty] * (len(arguments.args) - len(arguments.defaults))
        defaults = missing + [ast.literal_eval(default) for default in arguments.defaults]
        self.parameters = [
            (argument.arg, Parameter.POSITIONAL_OR_KEYWORD, default)
            for argument, default in zip(arguments.args, defaults, strict=True)
        ]
        self.keywords = None
        if arguments.kwarg:
            body = ast.get_source_segment(source, definition)
            read = r"kwargs\.(?:pop|get)\(\s*['\"](\w+)['\"]|['\"](\w+)['\"] in kwargs"
            self.keywords = {a or b for a, b in re.findall(read, body)}


def declared(family: str) -> dict[str, Declared]:
    """The functions that a family's package exports, by name; an alias is what it stands for."""
    exported = re.findall(r"['\"](\w+)['\"]", (OPS / family / "__init__.py").read_text().partition("__all__")[2])
    functions, aliases = {}, {}
    for path in (OPS / family).glob("*.py"):
        source = path.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                functions[node.name] = node, source
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                aliases[node.targets[0].id] = node.value.id
    return {
        name: Declared(*functions[aliases.get(name, name)])
        for name in exported
        if name.startswith(("chunk_", "fused_", "parallel_"))
    }
