"""The rooms of the package and the one direction their dependencies point in."""

import ast
import re
import sys
from pathlib import Path

import pytest

import eagle2_kernels

PACKAGE = Path(eagle2_kernels.__file__).parent

# What a room may import from the package; a room not named here is free.
ALLOWED = {
    "reference.py": set(),
    "tree.py": set(),
    "ops.py": {"reference"},
    "_library.py": set(),
    "expand.py": {"ops", "tree", "_checks"},
    "flatten.py": {"ops", "tree", "_checks"},
    "linear.py": {"ops", "_checks"},
    "logits.py": {"ops", "tree", "_checks"},
    "verify.py": {"ops", "tree", "_checks"},
    "attention.py": {"ops", "tree", "_checks"},
    "cache.py": {"ops", "tree", "_checks"},
    "candidates.py": {"_checks"},
}
# Nothing below models/ may import these; reference.py imports torch alone.
HEAVY = {"transformers", "tokenizers", "safetensors", "typer", "rich", "numpy", "triton"}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Modules outside the package, and rooms of the package, that a file imports anywhere."""
    outside, rooms = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                outside.add((node.module or "").split(".")[0])
            elif node.module:
                rooms.add(node.module.split(".")[0])
            else:
                rooms |= {alias.name for alias in node.names}
    return outside, rooms


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_operator_rooms_depend_only_downwards(name):
    outside, rooms = imports(PACKAGE / name)
    assert not outside & HEAVY
    assert rooms <= ALLOWED[name]


@pytest.mark.parametrize(
    "path",
    sorted((PACKAGE / "integrations").rglob("*.py")),
    ids=lambda p: str(p.relative_to(PACKAGE / "integrations")),
)
def test_adapters_to_engines_map_arguments_of_operators(path):
    outside, rooms = imports(path)
    engine = path.relative_to(PACKAGE / "integrations").parts[0].removesuffix(".py")
    assert outside <= {"__future__", "torch", engine, *sys.stdlib_module_names}
    operators = {"ops", "tree", "_checks", "expand", "flatten", "attention", "verify", "cache"}
    own = {"_layouts"} | {p.stem for p in path.parent.glob("*.py")}
    # Those that bring draft trees into the engine's loop call ours, or its parts.
    loop = {"decode", "models", "demo"} if engine in ("transformers", "vllm") else set()
    assert rooms <= operators | own | loop


def test_nothing_imports_the_adapters():
    for path in PACKAGE.rglob("*.py"):
        assert "integrations" not in imports(path)[1], path


def test_the_oracle_imports_only_torch():
    outside, _ = imports(PACKAGE / "reference.py")
    assert outside <= {"torch", "math", "__future__"}


def test_the_loop_does_not_import_transformers():
    outside, rooms = imports(PACKAGE / "decode.py")
    assert "transformers" not in outside
    assert not rooms & {"cli", "training"}


def test_nothing_imports_the_command_line():
    for path in PACKAGE.rglob("*.py"):
        assert "cli" not in imports(path)[1] or path.name == "__main__.py", path


def test_every_public_name_resolves():
    missing = [name for name in eagle2_kernels.__all__ if not hasattr(eagle2_kernels, name)]
    assert missing == []


ROOT = Path(__file__).parents[1]
TRITON_FILES = sorted((ROOT / "triton_kernels").glob("*.py"))
CUDA_FILES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))


def kernel_headers(path: Path) -> dict[str, str]:
    """The docstring of each Triton kernel, the comment before each CUDA kernel."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        kernels = [n for n in nodes if n.name.endswith("_kernel")]
        return {n.name: ast.get_docstring(n) or "" for n in kernels}
    found = re.finditer(r"((?://.*\n)*)(?:template.*\n)?__global__ void[^\n]*?(\w+)\(", text)
    return {match[2]: match[1] for match in found}


@pytest.mark.parametrize("path", TRITON_FILES + CUDA_FILES, ids=lambda p: f"{p.stem}{p.suffix}")
def test_each_kernel_states_its_bytes_and_flops(path):
    headers = kernel_headers(path)
    assert headers or path.stem in ("__init__", "launch")
    assert len(headers) == len(re.findall(r"^def \w+_kernel\(|^__global__", path.read_text(), re.M))
    for name, header in headers.items():
        assert re.search(r"^\W*bytes = ", header, re.M), name
        assert re.search(r"^\W*flops = ", header, re.M), name
