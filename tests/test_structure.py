"""The floors of docs/architecture.md, and who may name a mesh axis."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxmnt import errors
from jaxmnt.config import mesh

ROOT = Path(__file__).resolve().parent.parent
CHECKER = ROOT / "scripts" / "structure.py"

AXES = {*mesh.AXES} - {"data", "model"}
"""Names of mesh axes that mean nothing else anywhere."""
NAMING_AXES = {
    "config/mesh.py": "the table of axes, and the settings of the mesh",
    "training/build.py": "the section pipeline of the config",
    "plan/estimate.py": "time by axis",
    "drill/course.py": "the section pipeline of the config",
    "check/meshes.py": "the meshes that are compared",
    "trained_model.py": "the mesh of a command that calls a model",
    "score.py": "the context of a text, which is no axis",
}

WRITING_JSON_ITSELF = {
    "strict_json.py": "the one way to write JSON",
    "storage.py": "a digest, which must stay what it was",
    "data/grain_source.py": "a digest",
    "data/sources.py": "a digest",
    "huggingface/folder.py": "digests",
    "huggingface/export.py": "a digest",
    "data/chat/renderer.py": "what a template is given, as transformers does",
    "data/chat/sandbox.py": "what a template writes, as transformers does",
    "data/manifest.py": "a value in a message",
}


MODULE_TABLE = ROOT / "scripts" / "module_table.py"


def test_the_table_of_modules_is_current():
    result = subprocess.run([sys.executable, str(MODULE_TABLE)], capture_output=True, text=True, check=True)
    assert result.stdout == (ROOT / "docs" / "modules.md").read_text(), (
        "run: python scripts/module_table.py > docs/modules.md"
    )


VAGUE_SHARE, FRAGMENT_SHARE, FILLERS = 0.0002, 0.0, 219
"""Ceilings of what scripts/language.py counts in jaxmnt/. They may only fall."""


def test_names_and_doc_strings_say_what_things_are():
    spec = importlib.util.spec_from_file_location("language", ROOT / "scripts" / "language.py")
    language = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(language)
    counts = language.count(ROOT / "jaxmnt")
    assert len(counts.vague) <= VAGUE_SHARE * counts.bindings, counts.vague
    assert len(counts.fragments) <= FRAGMENT_SHARE * counts.docs, counts.fragments
    assert len(counts.fillers) <= FILLERS, counts.fillers


def checked(root: Path) -> tuple[int, str]:
    result = subprocess.run([sys.executable, str(CHECKER), str(root)], capture_output=True, text=True)
    assert not result.stderr
    return result.returncode, result.stdout


def test_no_import_points_up_and_none_goes_in_a_circle():
    code, output = checked(ROOT)
    assert code == 0, output


@pytest.mark.parametrize(
    ("module", "line", "told"),
    [
        ("storage", "from jaxmnt.run import lock", "storage imports run.lock, which is above it"),
        (
            "data.order",
            "def late():\n    import jaxmnt.training.step",
            "data.order imports training.step, which is above it (inside a function)",
        ),
        (
            "data.manifest",
            "from jaxmnt.data.store import open_prepared",
            "circle: data.attempts, data.index, data.manifest, data.npy_files, data.store",
        ),
        ("new", "", "new is on no floor"),
    ],
)
def test_what_breaks_the_floors_is_named(tmp_path, module, line, told):
    shutil.copytree(ROOT / "jaxmnt", tmp_path / "jaxmnt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    path = tmp_path / "jaxmnt" / f"{module.replace('.', '/')}.py"
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{line or 'from jaxmnt import errors'}\n")
    code, output = checked(tmp_path)
    assert code == 1
    assert told in output.splitlines()


def test_mesh_axes_are_named_where_one_communicates_along_them():
    found = set()
    for path in sorted((ROOT / "jaxmnt").rglob("*.py")):
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        if AXES & constants:
            found.add(str(path.relative_to(ROOT / "jaxmnt")))
    assert found == set(NAMING_AXES)


def test_json_is_written_in_one_way():
    """With bare NaN, which `json.dumps` writes, a strict parser refuses all of a file."""
    found = set()
    for path in sorted((ROOT / "jaxmnt").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        if any(isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.dumps", "json.dump") for node in nodes):
            found.add(str(path.relative_to(ROOT / "jaxmnt")))
    assert found == set(WRITING_JSON_ITSELF)


def test_one_function_says_how_an_extra_is_installed():
    """As the README has it, and only extras that there are."""
    texts = {path: path.read_text() for path in (ROOT / "jaxmnt").rglob("*.py")}
    assert [path.name for path, text in texts.items() if "pip install" in text] == ["errors.py"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for text in texts.values() for extra in re.findall(r"how_to_install\(['\"](\w+)['\"]\)", text)}
    assert {"data", "gs", "plan", "report", "lm_eval"} <= named <= extras.keys()
    example = re.search(r"^pip install .*\"", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert example and errors.how_to_install("cuda12").endswith(example[0])
