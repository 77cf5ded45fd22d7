"""Data flows one way: a module imports only what stands before it."""

import ast
import subprocess
import sys
from pathlib import Path

import fastrpb

ROOT = Path(fastrpb.__file__).parent
CORE = [
    "modes",
    "checks",
    "files",
    "processes",
    "init",
    "kernels",
    "dropout",
    "toeplitz",
    "bias_base",
    "bias",
    "bias2d",
    "features",
    "plain_attention",
    "fused_attention",
    "attention",
    "positions",
    "norms",
    "layers",
    "model_config",
    "model",
    "nn",
]
TOOLS = [
    "data",
    "config",
    "presets",
    "tables",
    "bench",
    "parts",
    "records",
    "run",
    "provenance",
    "evaluate",
    "progress",
    "replay",
    "state_dicts",
    "step",
    "train",
    "compare",
    "sweep",
    "figures",
    "report",
    "show",
    "options",
]
ORDER = [*CORE, "__init__", *TOOLS, "hf", "onnx", "cli", "__main__"]


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """The parts of fastrpb that a file imports, by their names in ORDER."""
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    paths = [f"{n.module}.{a.name}" for n in froms for a in n.names]
    names = [p.split(".")[1] for p in paths if p.startswith("fastrpb.")]
    return {name if name in ORDER else "__init__" for name in names}


def test_imports_follow_the_order():
    for path in ROOT.rglob("*.py"):
        assert layer(path) in ORDER, f"where does {path} stand?"
        for name in imported(ast.parse(path.read_text())):
            assert ORDER.index(name) <= ORDER.index(layer(path)), f"{path} imports {name}"


def test_the_core_needs_only_torch():
    code = "import sys, torch; old = {*sys.modules}; import fastrpb; print(*{*sys.modules} - old)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots = {name.split(".")[0] for name in run.stdout.split()}
    assert "fastrpb" in roots
    assert roots <= {"fastrpb", "torch", *sys.stdlib_module_names}


def test_the_first_product_is_quick():
    """Dynamo, a second to import, is for those who compile."""
    code = (
        "import sys, torch, fastrpb;"
        "w, v = torch.randn(2, 1399, requires_grad=True), torch.randn(1, 2, 700, 4);"
        "fastrpb.toeplitz_matmul(w, v, impl='fft').sum().backward();"
        "print('torch._dynamo' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
