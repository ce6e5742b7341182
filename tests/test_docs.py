"""What README and docs show is true: their commands run, their links lead somewhere, their schema is current."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, in_tiers

from jaxmnt.config.describe import json_schema
from jaxmnt.config.load import load_config

WRITTEN_BY_THE_SITE = {ROOT / "docs" / "settings.md"}
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *(ROOT / "examples").glob("**/*.md")} - WRITTEN_BY_THE_SITE
)
BLOCK = re.compile(r"(<!-- not run: [^>]+-->\n)? *```sh\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the working tree without anything that git ignores."""
    folder = tmp_path_factory.mktemp("checkout")
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\n")  # fmt: skip
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def shell(folder: Path, commands: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = dict(os.environ, PATH=path, JAX_NUM_CPU_DEVICES="1")
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True
    )


COMMANDS = {
    str(page.relative_to(ROOT)): [commands for marked, commands in BLOCK.findall(page.read_text()) if not marked]
    for page in PAGES
}
PAGES_WITH_COMMANDS = [page for page, commands in COMMANDS.items() if commands]
EXAMPLES = [page for page in PAGES_WITH_COMMANDS if page.startswith("examples/")]
RECIPE = re.compile(r"((?:train|--) --config examples/\w+/\w+\.yaml)(?! --dry-run)")


def run_commands(folder, page, arguments=""):
    """Runs every shell block that is not marked, in the order in which a reader meets them. Training of examples gets
    the arguments."""
    for made in ("data", "runs"):
        shutil.rmtree(folder / made, ignore_errors=True)
    for commands in COMMANDS[page]:
        result = shell(folder, RECIPE.sub(rf"\1{arguments}", commands))
        assert result.returncode == 0, f"{page}:\n{commands}\n{result.stdout}\n{result.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES_WITH_COMMANDS if page not in EXAMPLES])
def test_commands_of_a_page(checkout, page):
    run_commands(checkout, page)


@pytest.mark.parametrize("page", in_tiers(set(), EXAMPLES))
def test_commands_of_an_example_that_ends_early(checkout, page):
    run_commands(checkout, page, " train.steps=8 optimizer.warmup_steps=2")


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", EXAMPLES)
def test_commands_of_an_example(checkout, page):
    run_commands(checkout, page)


def test_links_of_all_pages():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                path = (page.parent / target).resolve()
                assert path.exists() or path in WRITTEN_BY_THE_SITE, f"{page.name} links to {target}"


def test_files_that_pages_name_are_there(checkout):
    """Files that pages name in backticks as paths of this project are there."""
    for page in PAGES:
        for name in re.findall(r"`((?:configs|scripts|benchmarks|docs|tests|\.ci)/[\w./-]+)`", page.read_text()):
            assert (checkout / name).exists(), f"{page.name} names {name}"


def test_schema_is_current():
    assert (ROOT / "configs" / "schema.json").read_text() == json_schema(), (
        "run: python -m jaxmnt.schema > configs/schema.json"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_configs_load_and_are_short(path):
    load_config(path)
    assert len(path.read_text().splitlines()) < 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("shorter", "share"),
    [
        pytest.param(["train.steps=160"], 0.75, marks=pytest.mark.slow),
        pytest.param([], 0.6, marks=pytest.mark.exhaustive),
    ],
)
def test_quickstart_from_nothing(checkout, tmp_path, shorter, share):
    """The README's first command in a fresh copy with an empty environment, stopped half-way and gone on with.

    Its held-out loss is below this share of that of a model that knows frequencies.
    """
    folder = tmp_path / "fresh"
    shutil.copytree(checkout, folder)
    for made in ("data", "runs"):  # by the commands of the pages
        shutil.rmtree(folder / made, ignore_errors=True)
    keep = ("PATH", "HOME", "PIP_", "SSL_", "REQUESTS_")
    environment = {k: v for k, v in os.environ.items() if k.startswith(keep)} | {"PYTHON": sys.executable}

    def quickstart(*arguments):
        return subprocess.run(
            ["scripts/quickstart", *shorter, *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )

    half = quickstart("train.stop_after=80")
    assert half.returncode == 75, half.stdout + half.stderr
    assert "run scripts/quickstart again" in half.stdout
    rest = quickstart()
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert "resuming after step 80" in rest.stdout
    assert "Installing" not in rest.stdout and "Preparing" not in rest.stdout
    frequencies = float(re.search(r"unigram ([\d.]+)", rest.stdout)[1])
    held_out = float(re.findall(r"held-out loss ([\d.]+)", rest.stdout)[-1])
    assert held_out < share * frequencies
    assert "\ndef " in rest.stdout.split("--------")[1]
    again = quickstart()
    assert again.returncode == 0 and "This run is finished" in again.stdout
