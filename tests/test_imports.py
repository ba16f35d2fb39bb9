"""Imports point upwards in the list of layers, and neither modules nor packages import each other."""

import ast
from pathlib import Path

import pytest

import npbml

SOURCE = Path(npbml.__file__).parent
# From the bottom to the top: a module may import from its own layer and from those before it.
LAYERS = (
    ("version", "errors", "registry", "parts", "settings", "json_files", "measures", "shapes"),  # without torch
    ("tensor_files", "randomness", "threads", "devices", "torch_compiler"),
    ("pictures",),
    ("tasks",),
    ("nets",),
    ("rule",),
    ("scorers",),
    ("learner",),
    ("methods",),
    ("catalogue",),
    ("classifier",),
    ("data",),
    ("engine",),
    ("stages",),
    ("lab",),
    ("report",),
    ("cli",),
    ("__main__",),
)
LIBRARY = {name for layer in LAYERS[:11] for name in layer}
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def modules() -> dict[str, Path]:
    """Every module by its full name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, path: Path) -> set[str]:
    """The modules of npbml that a module imports, anywhere in it; those for type checking alone do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "npbml":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "npbml"}
    return found - {name}


GRAPH = {name: imports(name, path) for name, path in MODULES.items()}


def layer(module: str) -> int:
    return RANK[module.split(".")[1]]


def test_every_module_has_a_layer() -> None:
    assert {name.split(".")[1] for name in MODULES if name != "npbml"} == set(RANK)


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name != "npbml"))
def test_imports_point_upwards(module: str) -> None:
    wrong = [other for other in GRAPH[module] if other == "npbml" or layer(other) > layer(module)]
    assert not wrong, f"{module} imports {wrong}"


def test_the_root_imports_nothing_but_its_version() -> None:
    assert GRAPH["npbml"] == {"npbml.version"}


def test_no_cycle_between_modules() -> None:
    """Lazy imports count: one inside a function must not hide a cycle."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way, module))
        if module not in done:
            for other in GRAPH.get(module, ()):
                visit(other, (*way, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_no_cycle_between_packages() -> None:
    graph: dict[str, set[str]] = {}
    for module, others in GRAPH.items():
        if module != "npbml":
            package = module.split(".")[1]
            graph.setdefault(package, set()).update(o.split(".")[1] for o in others if o != "npbml")
    for package, others in graph.items():
        for other in others - {package}:
            assert package not in graph.get(other, ()), f"{package} and {other} import each other"


def test_the_library_does_not_know_the_laboratory() -> None:
    known = {"npbml.lab", "npbml.report", "npbml.cli"}
    for module in MODULES:
        if module != "npbml" and module.split(".")[1] in LIBRARY:
            assert not [o for o in GRAPH[module] if any(o.startswith(name) for name in known)], module
