"""The config: what is accepted, what is refused, and with which words."""

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import command

from jaxmnt.config.describe import changes, fields_by_key, json_schema
from jaxmnt.config.load import (
    apply_overrides,
    as_override,
    as_typed,
    config_bytes,
    dump_config,
    flatten,
    load_config,
    parse_config,
    with_settings,
)
from jaxmnt.errors import ConfigError


def load(tmp_path, text: str, *overrides: str):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return load_config(path, list(overrides))


def test_overrides_win_and_later_ones_more(tmp_path):
    config = load(tmp_path, "train:\n  steps: 5\n", "train.steps=6", "train.steps=7", "optimizer.learning_rate=3e-4")
    assert config.train.steps == 7
    assert config.optimizer.learning_rate == 3e-4


_HARD = [
    "/home/me/Project #2/x", "a: b", "#", "~", "null", "", " a", "a ", "1e3", "010", "12:00", "yes", "True", "'", '"',
    "it's", "{a: b}", "[a]", "$HOME", "100%", "%YAML", "&a b", "*a", "!a", "- a", "? a", "|", "> a", "---", "...", "=",
    "a\\b", "ü ☃ 😀", "a\nb", "\t", "\x00", "\x85", "\ufeff", "\udcff", "a b " * 100,
    None, True, 3, 1e-5, 1e22, float("inf"), [0, 1], ["a #b", "~"], [], {}, {"a b": "#"}, ["a long entry"] * 50,
]  # fmt: skip


def test_what_is_written_as_an_override_is_read_as_the_same_value(tmp_path):
    letters, chance = "ab# :'\"~{}[]%$,-?!&*|>@`\\\n\t.0123e_=<üλ😀", random.Random(0)
    texts = ["".join(chance.choices(letters, k=chance.randint(0, 8))) for _ in range(1000)]
    (tmp_path / "a.yaml").write_text("seed: 1\n")
    for value in [*_HARD, *texts]:
        tree: dict = {}
        apply_overrides(tree, [as_override("data.path", value)])
        assert tree == {"data": {"path": value}}, as_override("data.path", value)
        assert shlex.split(as_typed("data.path", value)) == [as_override("data.path", value)]
    for value in _HARD:
        assert yaml.safe_load(with_settings(tmp_path / "a.yaml", [], {"run.notify": value}))["run"]["notify"] == value


@pytest.mark.parametrize("key", ["run.dir", "run.init_from", "data.path", "data.sources.a.path", "checkpoint.dir"])
def test_a_path_begins_in_a_home_and_holds_no_variable(tmp_path, monkeypatch, key):
    monkeypatch.setenv("HOME", str(tmp_path))
    read = lambda text: flatten(load(tmp_path, "", f"{key}={text}"))[key]
    assert read("~/a b") == f"{tmp_path}/a b" and read("./~/a") == "./~/a"
    if key == "run.init_from":
        assert read("hf:~/model") == f"hf:{tmp_path}/model"
    for text, words in [
        ("$HOME/a", rf"command line: {key}: '\$HOME/a' contains \$"), ("~", "~ is null in YAML"),
        ("~nobody-here/a", "there is no user nobody-here"),
        ("a" * 5000, r"has 5000 characters, but a path has at most 4096; shorten it"),
        ("/a/Project #2", "is a comment in YAML; for a text with #"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            read(text)
    section, _, rest = key.partition(".")
    tree = {section: {rest: "$DATA/x"}} if "." not in rest else {"data": {"sources": {"a": {"path": "$DATA/x"}}}}
    with pytest.raises(ConfigError, match=rf"a.yaml:\d+: {key}: "):
        load(tmp_path, yaml.dump(tree))


def test_every_setting_that_names_a_folder_is_known_as_a_path():
    paths = {name for name, field in fields_by_key().items() if "path" in field}
    named = {name for name in fields_by_key() if name.rpartition(".")[2] in ("path", "dir", "stage_dir", "mounts")}
    assert named < paths
    assert paths - named == {"run.init_from", "run.fork_from", "run.compile_cache", "launch.python", "lora.init_from"}


def test_options_that_are_paths_begin_in_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    from jaxmnt.commands import Parser, path_argument

    parser = Parser("test")
    parser.add_mutually_exclusive_group().add_argument("--output", type=Path)
    parser.add_argument("--run", type=path_argument)
    options = parser.parse_args(["--output=~/a", "--run=~/b@100"])
    assert options.output == tmp_path / "a" and options.run == f"{tmp_path}/b@100"
    with pytest.raises(ConfigError, match=r"argument --output: .*there is no user nobody-here"):
        parser.parse_args(["--output=~nobody-here/a"])


def test_a_file_extends_another(tmp_path):
    """Sections are merged, other values replaced; what is wrong is named with the file that says it."""
    (tmp_path / "shared").mkdir()
    base = tmp_path / "shared" / "base.yaml"
    base.write_text(
        "x-lr: &lr 0.5\ntrain: {steps: 50, microbatch_size: 2}\nmodel: {num_heads: 2}\n"
        "optimizer:\n  learning_rate: *lr\n"
    )
    own = tmp_path / "own.yaml"
    own.write_text("extends: shared/base.yaml\ntrain:\n  steps: 60\nmodel:\n")
    config = load_config(own, ["optimizer.warmup_steps=1"])
    assert (config.train.steps, config.train.microbatch_size, config.model.num_heads) == (60, 2, 2)
    assert config.optimizer.learning_rate == 0.5 and config.run.dir == "runs/own"
    moved = tmp_path / "elsewhere" / "frozen.yaml"
    moved.parent.mkdir()
    moved.write_bytes(config_bytes(own))
    assert load_config(moved, ["run.dir=runs/own", "optimizer.warmup_steps=1"]) == config
    assert config_bytes(base) == base.read_bytes()


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("train: {step: 3}", r"base\.yaml:1: train\.step: unknown key"),
        ("train: [", r"base\.yaml:1: not valid YAML: .* \(.*own\.yaml:1 extends it\)"),
        (None, r"base\.yaml: no such config file.* \(.*own\.yaml:1 extends it\)"),
        ("extends: own.yaml", r"base\.yaml:1: extends: own\.yaml extends this file in turn"),
        ("extends: [a]", r"base\.yaml:1: extends: must be the path of a config file, not"),
    ],
)
def test_what_is_wrong_with_a_file_that_is_extended_is_named(tmp_path, base, words):
    (tmp_path / "own.yaml").write_text("extends: base.yaml\n")
    if base is not None:
        (tmp_path / "base.yaml").write_text(base)
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "own.yaml")


def test_what_other_programs_do_and_this_one_does_not_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"dpo: unknown key; Training on preferences is not available in"):
        load(tmp_path, "dpo: {beta: 0.1}")
    with pytest.raises(ConfigError, match=r"lora\.r: unknown key; .*lora\.rank"):
        load(tmp_path, "lora: {r: 8}")
    with pytest.raises(ConfigError, match=r"peft: unknown key; did you mean lora"):
        load(tmp_path, "peft: {rank: 8}")
    with pytest.raises(ConfigError, match=r"optimizer\.rules\.0\.patern: unknown key; did you mean .*\.pattern\?"):
        load(tmp_path, "optimizer: {rules: [{patern: x}]}")


def test_derived_defaults(tmp_path):
    config = load(tmp_path, "model: {hidden_size: 256, num_heads: 8}\n")
    assert (config.model.head_dim, config.model.num_kv_heads, config.model.intermediate_size) == (32, 8, 704)
    assert config.mesh.data == -1
    assert config.run.dir == "runs/a"
    assert load(tmp_path, "mesh: {fsdp: -1}").mesh.data == 1


def test_empty_sections_mean_defaults(tmp_path):
    assert load(tmp_path, "train:\nmodel:\n").train.steps == 1000


@pytest.mark.parametrize(
    ("text", "override", "words"),
    [
        ("model:\n  num_layer: 3\n", None, ["a.yaml:2", "model.num_layer", "model.num_layers"]),
        ("model:\n  steps: 3\n", None, ["a.yaml:2", "did you mean train.steps"]),
        ("modle:\n  num_layers: 3\n", None, ["a.yaml:1", "modle", "model"]),
        ("", "modle.num_layers=3", ["command line", "modle"]),
        ("train:\n  steps: many\n", None, ["a.yaml:2", "train.steps", "integer", "'many'"]),
        ("train:\n  steps: true\n", None, ["train.steps", "integer"]),
        ("train:\n  steps: 0\n", None, ["train.steps", "integer of at least 1"]),
        ("train: 3\n", None, ["train", "a.yaml:1"]),
        ("", "train.precision=fp8", ["train.precision", "auto, float32, bfloat16 or float8"]),
        ("", "model.num_heads=7", ["model.num_heads", "evenly", "512"]),
        ("", "model.num_kv_heads=3", ["model.num_kv_heads", "divide"]),
        ("mesh: {data: -1, fsdp: -1}", None, ["mesh.fsdp", "only one"]),
        ("", "mesh.fsdp=0", ["mesh.fsdp", "positive"]),
        ("optimizer: {warmup_steps: 10}\ntrain: {steps: 10}", None, ["a.yaml:1", "optimizer.warmup_steps"]),
        ("run:\n  dir:\n", None, ["a.yaml:2: run.dir: is empty; name a folder, or leave it out for runs/a"]),
        ("", "run.dir=", ["command line: run.dir: is empty"]),
        ("", "run.dir=''", ["command line: run.dir: is empty"]),
        ("run:\n  max_minutes: 2\n", None, ["a.yaml:2", "run.max_minutes", "run.stop_margin_seconds (120 s)", "raise"]),
        ("train: {steps: 1}\ntrain: {steps: 2}\n", None, ["a.yaml:2", "twice"]),
        ("train: [\n", None, ["not valid YAML"]),
        ("- 1\n", None, ["mapping"]),
        ("", "optimizer.learning_rate=.inf", ["command line: optimizer.learning_rate", "above 0, not inf"]),
        ("optimizer:\n  weight_decay: .nan\n", None, ["a.yaml:2: optimizer.weight_decay", "not nan"]),
        ("", "train.steps", ["key.sub=value"]),
        ("", "seed.x=1", ["seed"]),
    ],
)
def test_mistakes_are_named(tmp_path, text, override, words):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *([override] if override else []))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("place", ["r/checkpoints", "r/checkpoints/b", "./r//x/../checkpoints/"])
def test_a_second_place_among_the_checkpoints_is_refused(tmp_path, monkeypatch, place):
    """--fresh would move it away, with its lock."""
    monkeypatch.chdir(tmp_path)
    for run_dir, given in (("r", place), (tmp_path / "r", place), ("r", tmp_path / place)):
        with pytest.raises(
            ConfigError, match=r"^command line: checkpoint\.dir: .* run\.dir .* leave checkpoint\.dir out"
        ):
            load(tmp_path, "", f"run.dir={run_dir}", f"checkpoint.dir={given}")
    for apart in ("r", "r/checkpoints2", "x/checkpoints", "gs://r/checkpoints"):
        assert load(tmp_path, "", "run.dir=r", f"checkpoint.dir={apart}").checkpoint.dir == apart


def test_an_override_changes_one_place_of_those_that_share_an_alias(tmp_path):
    shared = "{a: &s {path: x, weight: 1}, b: *s, c: {<<: *s}}"
    weight = "data.sources.a.weight=3.0"
    for config in (
        load(tmp_path, f"data: {{sources: {shared}}}\n", weight),
        load(tmp_path, "", f"data.sources={shared}", weight),
    ):
        assert [config.data.sources[name].weight for name in "abc"] == [3.0, 1.0, 1.0]


@pytest.mark.parametrize("value", ["&a [*a]", f"[&a [{'x, ' * 99}], &b [{'*a, ' * 99}], [{'*b, ' * 99}]]"])
def test_aliases_that_stand_for_too_much_are_one_message(tmp_path, value):
    with pytest.raises(ConfigError, match=r"override .* its aliases contain themselves, or expand to over 20000"):
        load(tmp_path, "", f"train.remat_save={value}")


def test_missing_file_lists_its_neighbours(tmp_path):
    (tmp_path / "small.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"smal\.yaml: no such config file; in .*small\.yaml"):
        load_config(tmp_path / "smal.yaml")


def test_a_missing_file_lists_configs_that_are_not_hidden(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(".pre-commit-config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"^nope\.yaml: no such config file$"):
        load_config("nope.yaml")
    Path("configs").mkdir()
    for name in ("own.yml", "configs/a.yaml", "configs/b.yaml"):
        Path(name).write_text("")
    with pytest.raises(ConfigError, match=r"^nope: no such config file; in \.: own\.yml; in configs: a\.yaml, b"):
        load_config("nope")
    with pytest.raises(ConfigError, match=r"^configs/c: no such config file; in configs: a\.yaml, b\.yaml$"):
        load_config("configs/c")


def test_a_folder_in_place_of_a_config_is_told_with_the_config_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/own").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^runs/own: is a folder, not a config file; give a file$"):
        load_config("runs/own")
    Path("runs/own/config.yaml").write_text("")
    words = r"^runs/own: is a folder, not a config file; give the config in it: runs/own/config\.yaml$"
    with pytest.raises(ConfigError, match=words):
        load_config("runs/own")


def test_resolved_config_loads_to_itself_and_holds_no_process(tmp_path):
    config = load(tmp_path, "mesh: {fsdp: 2}\n", "cluster.processes=3", "cluster.process_id=1")
    text = dump_config(config)
    assert "cluster" not in yaml.safe_load(text)
    again = parse_config(yaml.safe_load(text))
    assert changes(again, config) == []


def test_changes_are_classified(tmp_path):
    before = load(tmp_path, "")
    now = load(tmp_path, "", "train.steps=9", "seed=3", "mesh.fsdp=2", "checkpoint.keep=9")
    found = {change.key: change.resume for change in changes(before, now)}
    assert found == {
        "train.steps": "maths",
        "seed": "breaks",
        "mesh.fsdp": "harmless",
        "checkpoint.keep": "harmless",
    }


def test_every_key_is_documented_and_in_the_schema():
    schema, named = (
        json.loads(json_schema()),
        {
            "data.sources.NAME": "Source",
            "data.eval_sets.NAME": "EvalSet",
            "data.grain": "Grain",
            "data.sources.NAME.grain": "Grain",
            "model.rope_scaling": "RopeScaling",
            "optimizer.muon": "Muon",
            "optimizer.average": "Average",
        },
    )
    for key, field in fields_by_key().items():
        assert field["description"].endswith("."), key
        section, _, name = key.rpartition(".")
        if section:
            assert name in schema["$defs"][named.get(section, section.capitalize())]["properties"]


def test_help_shows_every_key_without_jax():
    code = (
        "import sys\n"
        "from jaxmnt.train import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'jax', 'flax', 'orbax', 'grain', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for key in fields_by_key():
        assert key in result.stdout


@pytest.mark.parametrize("name", ["train", "prepare", "launch", "generate", "schema"])
def test_commands_answer_help_and_the_console_script_knows_them(name):
    assert command(f"jaxmnt.{name}", "--help").returncode == 0
    assert name in command("jaxmnt", "--help").stdout


def test_unknown_command():
    result = command("jaxmnt", "trian")
    assert (result.returncode, "train" in result.stderr) == (2, True)


def test_message_without_traceback_unless_debug(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("train:\n  step: 3\n")
    plain = command("jaxmnt.train", "--config", str(path))
    assert plain.returncode == 2
    assert plain.stderr.count("\n") == 1 and "did you mean train.steps?" in plain.stderr
    debug = command("jaxmnt.train", "--config", str(path), "--debug")
    assert debug.returncode == 2 and "Traceback" in debug.stderr


def test_a_terminal_without_arrows_is_no_reason_to_fail():
    result = command("jaxmnt", "--help", PYTHONIOENCODING="ascii")
    assert result.returncode == 0 and "usage: jaxmnt COMMAND" in result.stdout
