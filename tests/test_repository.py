"""The repository as a whole: its import names are its own, layers hold, control processes stay light, locks are closed,
and the documents tell of commands that exist."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from pdserve.__main__ import COMMANDS
from pdserve.paths import ROOT, SHARED_NAMES, foreign_names
from requirements.lock import WITHOUT_DEPENDENCIES, dependencies

HEAVY = ("torch", "transformers", "triton", "gguf")


def run(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def tracked(pattern: str) -> list[Path]:
    """Files that git knows, or all that match where there is no git (a copied tree)."""
    listed = run("git", "ls-files", pattern).stdout.split()
    return [ROOT / name for name in listed] or sorted(ROOT.glob(pattern))


# Import names


def test_import_names_are_this_repositorys() -> None:
    assert foreign_names() == []


def test_they_stay_ours_beside_other_distributions_of_the_same_names(tmp_path: Path) -> None:
    for name in SHARED_NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the other one')")
    source = (
        "import sys; sys.path.append(sys.argv[1]); import kernels, proto, pdserve.paths as p; print(p.foreign_names())"
    )
    result = run(sys.executable, "-c", source, str(tmp_path))
    assert result.stdout.strip() == "[]", result.stderr


def test_another_distribution_in_front_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    source = "import sys; import pdserve.paths as p; sys.path.insert(0, sys.argv[1]); print(p.foreign_names())"
    result = run(sys.executable, "-c", source, str(tmp_path))
    assert "import name 'kernels' resolves to" in result.stdout


# Layers


def test_import_layers() -> None:
    lint_imports = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or "lint-imports"
    result = run(lint_imports, "--no-cache")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "modules",
    ["router.policy, router.lifecycle, router.ledger", "router.server", "gateway.__main__", "pdserve.up, pdserve.demo"],
)
def test_control_processes_do_not_import_an_engine(modules: str) -> None:
    source = f"import {modules}, sys; print([m for m in {HEAVY[:3]!r} if m in sys.modules])"
    result = run(sys.executable, "-W", "error", "-c", source)
    assert result.stdout.strip() == "[]", result.stderr


def test_pure_modules_import_alone() -> None:
    pure = "engine.block_manager, engine.scheduler, engine.sequence, kvtransfer.lease, router.policy"
    source = f"import {pure}, sys; print([m for m in {(*HEAVY, 'grpc', 'redis')!r} if m in sys.modules])"
    result = run(sys.executable, "-W", "error", "-c", source)
    assert result.stdout.strip() == "[]", result.stderr


def test_package_inits_stay_empty() -> None:
    filled = [str(path.relative_to(ROOT)) for path in tracked("*__init__.py") if path.read_text().strip()]
    assert not filled


# Locks


def lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def needs(name: str) -> set[str]:
    """Distributions that `name` needs on this machine, without extras."""
    if name in WITHOUT_DEPENDENCIES:
        return set()
    return {canonicalize_name(requirement.name) for requirement in dependencies(name, frozenset())}


def test_locks_are_closed() -> None:
    run_lock = lock("torch.txt") | lock("run.txt")
    for locked in (run_lock, run_lock | lock("test.txt")):
        missing = {f"{name} needs {need}" for name in locked for need in needs(name) if need not in locked}
        assert not missing


def test_the_demo_installs_nothing_large_that_it_does_not_need() -> None:
    unwanted = {"triton", "pytest", "hypothesis", "ruff", "mypy", "openai", "torchvision", "torchaudio", "kernels"}
    assert not {name for name in lock("run.txt") if name in unwanted or name.startswith("nvidia")}


def test_locks_name_no_registry() -> None:
    for path in (ROOT / "requirements").iterdir():
        assert not re.search(r"https?://|--index|--find-links", path.read_text()), path.name


# Documents


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *tracked("docs/*.md")]


def code(path: Path) -> str:
    """What a document shows as code: fenced blocks and `spans`."""
    text = path.read_text()
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for path in documents() for target in re.findall(r"\bmake ([a-z-]+)", code(path))}
    assert {"demo", "up", "test", "check"} <= named <= targets


def test_every_command_in_the_documents_exists() -> None:
    named = {name for path in documents() for name in re.findall(r"python -m pdserve ([a-z]+)", code(path))}
    assert named == set(COMMANDS)


def test_every_option_in_the_documents_exists() -> None:
    known = {"config"} | {field.replace("_", "-") for cls in COMMANDS.values() for field in cls.model_fields}
    for path in documents():
        for line in re.findall(r"python -m pdserve .*|make \w+ ARGS=.*", code(path)):
            unknown = set(re.findall(r"--(?:no-)?([a-z][a-z-]+)", line)) - known
            assert not unknown, f"{path.name}: {line}"


def test_every_file_that_a_document_names_exists() -> None:
    """Named from the root, or from the folder that the document is about."""
    for path in documents():
        names = re.findall(r"`([a-z_]+/[\w./-]+\.(?:py|proto|md|txt|yaml|yml|cpp|h))`", path.read_text())
        links = [target for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()) if "://" not in target]
        missing = [name for name in names if not (ROOT / name).exists() and not any(ROOT.glob(f"*/{name}"))]
        assert not missing, path.name
        assert not [target for target in links if not (path.parent / target).exists()], path.name


def test_nothing_tracked_names_this_machine() -> None:
    # Spelled apart, so that this file does not name them either.
    forbidden = re.compile("|".join(("/wo" + "rk/", "/roo" + "t/", "pypi" + r"\.org", "pythonhosted" + r"\.org")))
    suffixes = {".py", ".md", ".txt", ".in", ".toml", ".yml", ".yaml", ".proto", ".h", ".cpp", ""}
    files = [path for path in tracked("*") if path.suffix in suffixes and path.is_file()]
    found = [str(p.relative_to(ROOT)) for p in files if forbidden.search(p.read_text(errors="replace"))]
    assert not found


def dotted_names(tree: ast.AST) -> set[tuple[str, str]]:
    """The `a.b` in `tree` whose `a` is a plain name."""
    found = [(node.value, node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {(value.id, attribute) for value, attribute in found if isinstance(value, ast.Name)}


def test_python_in_the_documents_uses_names_that_exist() -> None:
    blocks = {
        b: path.name for path in documents() for b in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    }
    assert any("import grpc" in block for block in blocks)
    for block, document in blocks.items():
        tree = ast.parse(block)
        imported: dict[str, Any] = {}
        imports: list[ast.stmt] = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), document, "exec"), imported)
        for name, attribute in dotted_names(tree):
            if isinstance(imported.get(name), ModuleType):
                assert hasattr(imported[name], attribute), f"{document}: {name}.{attribute}"
