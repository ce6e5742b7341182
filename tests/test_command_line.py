"""The command line: help that fits the terminal, exit codes, and what people type told as what it is."""

import json
import subprocess
import sys

import pytest
from conftest import command

from jaxmnt import __version__
from jaxmnt.__main__ import COMMANDS, _dispatch
from jaxmnt.config.describe import fields_by_key
from jaxmnt.config.load import load_config, parse_config
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.run.arguments import parse_arguments

HERE, RUN = (0, 1, 2), (0, 1, 2, 3, 4, 75)

CODES = {
    "": RUN,
    "train": RUN,
    "prepare": (0, 1, 2, 75),
    "data": HERE,
    "checkpoint": HERE,
    "checkpoint list": HERE,
    "checkpoint verify": HERE,
    "checkpoint show": HERE,
    "checkpoint diff": HERE,
    "checkpoint export": HERE,
    "checkpoint average": HERE,
    "check": HERE,
    "preflight": (0, 1, 2, 3, 4),
    "launch": RUN,
    "launch local": RUN,
    "launch slurm": HERE,
    "launch gke": HERE,
    "drill": HERE,
    "report": HERE,
    "generate": HERE,
    "score": HERE,
    "lm_eval": HERE,
    "convert": HERE,
    "plan": HERE,
    "simulate": HERE,
    "data index": HERE,
    "bench": HERE,
    "convert from-hf": HERE,
    "convert to-hf": HERE,
    "convert from-peft": HERE,
    "convert to-peft": HERE,
    "convert settings": HERE,
    "schema": HERE,
}

_ALL_HELP = """
import contextlib, io, json, os, sys
from jaxmnt.__main__ import _dispatch
texts = {}
for width in (80, 50, 200):
    os.environ["COLUMNS"] = str(width)
    for name in json.loads(sys.argv[1]):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            _dispatch([*name.split(), "--help"])
        texts[f"{name}/{width}"] = out.getvalue()
print(json.dumps({"texts": texts, "heavy": sorted({"jax", "flax", "orbax", "grain", "numpy"} & set(sys.modules))}))
"""


@pytest.fixture(scope="module")
def helped():
    done = subprocess.run([sys.executable, "-c", _ALL_HELP, json.dumps([*CODES])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_help_imports_nothing_heavy_and_the_table_has_all_commands(helped):
    assert helped["heavy"] == []
    assert set(COMMANDS) == {name.partition(" ")[0] for name in CODES if name}
    for name in ("launch", "checkpoint", "convert"):
        listed = {word.partition(" ")[2] for word in CODES if word.startswith(f"{name} ")}
        lines = helped["texts"][f"{name}/200"].splitlines()
        assert listed == {line.split()[0] for line in lines if line.startswith("    ") and not line.startswith("     ")}


@pytest.mark.parametrize("name", CODES)
def test_help_fits_the_terminal_and_names_the_exit_codes(helped, name):
    for width in (80, 50, 200):
        text = helped["texts"][f"{name}/{width}"]
        assert max(map(len, text.splitlines())) <= width, [line for line in text.splitlines() if len(line) > width]
        codes = text.partition("exit codes:\n")[2].splitlines()
        assert tuple(int(line.split()[0]) for line in codes if line[2:3].isdigit()) == CODES[name]
        assert name == "" or "--debug" in text


def test_help_of_settings_is_in_words(helped):
    text = helped["texts"]["train/200"]
    for key in fields_by_key():
        assert f"  {key}  " in text
    assert "checkpoint.every_minutes  number above 0, auto or null; default null" in text
    assert "cluster.local_devices  list of integers of at least 0, or null; default null" in text
    assert "mesh.zero  auto, 1, 2 or 3; default auto" in text
    for inside in ("Annotated", "FieldInfo", "typing", "<class", "NoneType", "Gt(", "Ge("):
        assert inside not in text


def test_version(capsys):
    done = command("jaxmnt", "--version")
    assert (done.returncode, done.stdout) == (0, f"jaxmnt {__version__}\n")
    assert _dispatch(["--version"]) == ExitCode.FINISHED
    assert capsys.readouterr().out == done.stdout


def refused(tmp_path, text: str, *overrides: str) -> str:
    """What is said of a config; one line."""
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(tmp_path) + "/")


@pytest.mark.parametrize(
    ("typed", "meant"),
    {
        "optimizer.lr": "optimizer.learning_rate",
        "train.batch_size": "data.global_batch_size",
        "batch_size": "data.global_batch_size",
        "gradient_accumulation_steps": "train.microbatch_size",
        "train.gradient_accumulation_steps": "train.microbatch_size",
        "train.micro_batch_size": "train.microbatch_size",
        "data.seq_len": "data.sequence_length",
        "train.max_steps": "train.steps",
        "model.n_layers": "model.num_layers",
        "model.layers": "model.num_layers",
        "model.d_model": "model.hidden_size",
        "model.num_hidden_layers": "model.num_layers",
        "mesh.tp": "mesh.model",
        "mesh.pp": "mesh.pipeline",
        "mesh.dp": "mesh.data",
        "mesh.cp": "mesh.context",
        "mesh.ep": "mesh.expert",
        "tp": "mesh.model",
        "optim.lr": "optimizer.learning_rate",
        "trainer.max_steps": "train.steps",
        "modle.num_layers": "model.num_layers",
        "model.steps": "train.steps",
        "train.seed": "seed",
        "train.dir": "run.dir or checkpoint.dir",
        "train.stesp": "train.steps",
        "train.num_layer": "model.num_layers",
        "steps": "train.steps",
        "Optimizer.LR": "optimizer.learning_rate",
    }.items(),
)
def test_a_setting_by_another_name_gets_the_right_one(tmp_path, typed, meant):
    assert f"did you mean {meant}?" in refused(tmp_path, "", f"{typed}=8")


def test_the_table_of_names_is_sound():
    from jaxmnt.config.explain import field_of, section_fields, synonyms

    settings, sections = synonyms()["settings"], synonyms()["sections"]
    for entries in (settings, [{"names": text} for text in sections.values()]):
        names = [name for entry in entries for name in entry["names"].split()]
        assert len(names) == len(set(names))
    for entry in settings:
        assert set(entry) - {"note"} == {"key", "names"} and field_of(entry["key"]) is not None, entry
        own = section_fields([entry["key"].partition(".")[0]])
        assert not own.keys() & set(entry["names"].split()), entry
    assert all(section_fields([section]) for section in sections)


@pytest.mark.parametrize("text", ["train: {steps: 1e3}", "train: {steps: 1.0e+3}", "train: {steps: 1000.0}"])
def test_an_integer_may_be_written_like_a_float(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    config = load_config(path, ["mesh.zero=2e0", "pipeline.layers=[1e1]", "data.skip=[{from_row: 1e3, rows: 16.0}]"])
    found = (config.train.steps, config.mesh.zero, config.pipeline.layers[0], config.data.skip[0].from_row)
    assert found == (1000, 2, 10, 1000) and all(type(number) is int for number in found)
    assert type(load_config(path, ["watchdog.factor=2e1"]).watchdog.factor) is float


def test_what_is_no_integer_is_refused(tmp_path):
    for value, shown in {"1.5e0": "1.5", "1e400": "inf", "1e16": "1e+16", ".nan": "nan", "010": "'010'"}.items():
        told = "train.steps: must be an integer of at least 1, not " + shown
        assert f"command line: {told}" in refused(tmp_path, "", f"train.steps={value}")
        assert f"a.yaml:2: {told}" in refused(tmp_path, f"train:\n  steps: {value}\n")


def test_text_that_older_yaml_takes_for_something_else_is_text(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("")
    assert load_config(path, ["run.dir=2026-11-22"]).run.dir == "2026-11-22"
    assert "must be a number above 0, or null, not '12:00'" in refused(tmp_path, "", "launch.hours=12:00")
    assert "must be text or null, not 123; to make it text, put it in two kinds of quotes" in refused(
        tmp_path, "", "slurm.account=123"
    )
    message = refused(tmp_path, "launch: {environment: {A: no}}")
    assert 'must be text, not false; to make it text, put it in quotes: "…"' in message


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train.steps", "=", "20"], "'train.steps = 20': a setting has no spaces around its =; write train.steps=20"),
        (["train.steps=", "20"], "write train.steps=20"),
        (
            ["train.steps", "=20", "seed=1"],
            "'train.steps =20': a setting has no spaces around its =; write train.steps=20",
        ),
        (["train.steps = 20"], "write train.steps=20"),
        (["train.steps", "20"], "write train.steps=20"),
        (["train.steps:20"], "write train.steps=20"),
        (["train.steps", "seed=1"], "write key.sub=value"),
        (["--train.steps=20"], "'--train.steps=20': a setting has no dashes; write train.steps=20"),
        (["--train.steps", "20"], "write train.steps=20"),
        (["-train.steps=20"], "write train.steps=20"),
        (["--seed=3"], "unrecognized arguments: --seed=3; settings have no dashes: write seed=3"),
        (["--lr=3e-4"], "settings have no dashes: write optimizer.learning_rate=3e-4"),
        (["--batch-size", "3"], "settings have no dashes: write data.global_batch_size=VALUE"),
        (["--nonsense"], "unrecognized arguments: --nonsense; python -m jaxmnt.train --help shows what it takes"),
        (["other.yaml"], "'other.yaml' is not a setting; pass a config file with --config other.yaml"),
        (["--devices", "x"], "argument --devices: invalid int value: 'x'"),
    ],
)
def test_what_is_no_setting_is_told_as_what_it_is(tmp_path, arguments, told):
    from jaxmnt import train

    (tmp_path / "a.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        train.main(["--config", str(tmp_path / "a.yaml"), *arguments])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in CODES if name not in ("", "schema")])
def test_no_arguments_are_told_in_one_line(name):
    with pytest.raises(ConfigError) as caught:
        _dispatch(name.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", [["--config", "a.yaml"], ["--config=a.yaml", "train.steps=3"], ["train.steps=3"]])
def test_arguments_of_the_training_before_the_dashes(more):
    from jaxmnt.launch import __main__ as launch

    with pytest.raises(ConfigError, match="come after a lone --, such as: local --processes 2 -- --config FILE"):
        launch.main(["local", "--processes", "2", *more])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train:\n\tsteps: 5\n", "a.yaml:2: this line contains a tab, and YAML requires spaces"),
        ("train:\n  steps: 5\n\tseed: 3\n", "a.yaml:3: this line contains a tab"),
        ("a: " + "[" * 3000, "nested too deeply"),
        ("train: &t {steps: 5, x: *t}\n", "a.yaml:1: train.x contains itself"),
        ("run: {dir: !!timestamp x}", "not valid YAML"),
        ("seed: !!int x", "not valid YAML"),
        ("5: 3\n", "the key 5 must be text; put it in quotes"),
        (
            "data:\n  skip:\n  - from_row: 1\n    rows: -1\n",
            "a.yaml:4: data.skip.0.rows: must be an integer of at least 1",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(tmp_path, text, told):
    assert told in refused(tmp_path, text)


def test_a_type_with_several_forms_is_told_in_words_and_from_where(tmp_path):
    words = "checkpoint.every_minutes: must be a number above 0, auto or null, not -1 (Also save"
    assert refused(tmp_path, "", "checkpoint.every_minutes=-1").startswith(f"command line: {words}")
    assert refused(tmp_path, "checkpoint:\n  every_minutes: -1\n").startswith(f"a.yaml:2: {words}")
    assert refused(tmp_path, "model:\n  num_layer: 3\n", "model={num_layer: 3}").startswith("command line: model.num_")


WRONG = [
    True, -1, 0, 1.5, 2**60, 1e300, float("nan"), float("-inf"), "x", "", None, [], {}, [[]], [{}], [-1], ["x", None],
    {"x": 1}, {"x": None}, {"x": {}}, {"x": {"path": 3}}, {3: 4}, {"x": {"weight": "x"}}, [{"rows": "x"}], object(),
    b"x", "a\nb", {"a\nb": 3},
]  # fmt: skip
"""Values that most keys do not take."""


def test_every_error_of_every_key_is_one_line_in_words():
    """All that pydantic can find wrong with the schema is said in our words; what is accepted raises nothing."""
    keys = [key.replace("NAME", "one") for key in fields_by_key()]
    keys += ["train", "data.skip", "nothing", "train.nothing", "gke", "seed.x"]
    told = 0
    for key in keys:
        for value in WRONG:
            tree: dict = {}
            place = tree
            *parents, last = key.split(".")
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
            try:
                parse_config(tree, "there")
            except ConfigError as error:
                message = str(error)
                told += 1
                assert message.startswith("there: ") and message.isprintable(), message
                inside = (
                    "nput should",
                    "literal[",
                    "constrained",
                    "Annotated",
                    "function-",
                    "[key]",
                    "pydantic",
                    "_type",
                )
                assert not any(word in message for word in inside), message
                named = message.removeprefix("there: ").partition(":")[0]
                assert named.split(".")[0] in {*tree, "the key 3 must be text; put it in quotes"}, message
    assert told > 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--config", "a.yaml", "--config", "b.yaml"], "argument --config: given twice, and it takes one"),
        (["train", "--config=a.yaml", "train.steps=1", "--config=a.yaml"], "argument --config: given twice"),
        (["prepare", "--input", "a", "--output", "b", "--output", "c"], "argument --output: given twice"),
        (
            ["checkpoint", "list", "runs/a", "--config", "a", "--config", "b"],
            "argument --config: given twice|unrecogni",
        ),
        (["launch", "slurm", "--config", "a", "--nodes", "2", "--nodes", "3"], "argument --nodes: given twice"),
        (
            ["launch", "local", "--processes", "1", "--processes", "2", "--", "--config", "a"],
            "--processes: given twice",
        ),
        (["launch", "slurm", "--config", "a", "--nodes", "2", "launch.nodes=3"], "--nodes: launch.nodes is also given"),
    ],
)
def test_what_is_said_twice_is_no_guess(arguments, message, monkeypatch):
    monkeypatch.setattr("jaxmnt.early_signals.remember", lambda: None)  # this process keeps its handlers
    with pytest.raises(ConfigError, match=message):
        _dispatch(arguments)


def test_of_two_settings_the_later_counts_and_lists_add_up(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text a")
    (tmp_path / "b.txt").write_text("text b")
    inputs = ["--input", str(tmp_path / "a.txt"), "--input", str(tmp_path / "b.txt")]
    output = ["--output", str(tmp_path / "out"), "--eval-fraction", "0", "--workers", "1"]
    assert _dispatch(["prepare", *inputs, *output]) == ExitCode.FINISHED
    assert "train  2 documents" in capsys.readouterr().out
    same = ["data.sequence_length=4", "data.global_batch_size=1"]
    assert _dispatch(["data", "--path", str(tmp_path / "out"), *same, *same]) == ExitCode.FINISHED
    assert capsys.readouterr().err == ""
    assert _dispatch(["data", "--path", str(tmp_path / "out"), *same, "data.sequence_length=2"]) == ExitCode.FINISHED
    replaced = "jaxmnt: data.sequence_length=4 is replaced by data.sequence_length=2, which comes later\n"
    assert capsys.readouterr().err == replaced


def test_a_key_twice_in_a_value_is_refused_as_in_a_file(tmp_path):
    assert "data.path is given twice (first on line 2)" in refused(tmp_path, "data:\n  path: a\n  path: b\n")
    message = refused(tmp_path, "", "data.sources={a: {path: x, weight: 1}, a: {path: y, weight: 1}}")
    assert message.endswith(": a is given twice; keep one")


def test_help_of_a_topic_shows_its_settings_alone(capsys):
    """Those of the entries of lists among them."""
    for topic in ("optimizer", "optimizer.rules"):
        with pytest.raises(SystemExit) as ended:
            parse_arguments(["--help", topic])
        shown = capsys.readouterr().out
        assert ended.value.code == 0 and "optimizer.rules.N.pattern" in shown and "train.steps" not in shown
        assert ("optimizer.beta2" in shown) == (topic == "optimizer")
    with pytest.raises(ConfigError, match=r"--help: no setting begins with optimiser; did you mean optimizer\?"):
        parse_arguments(["--help", "optimiser"])
