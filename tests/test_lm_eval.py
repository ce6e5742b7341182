"""The harness of others on a run of ours, with tasks made here."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import run_in as run

from jaxmnt import lm_eval
from jaxmnt.errors import ConfigError, ExitCode
from jaxmnt.score import ScoreRequest, scores
from jaxmnt.trained_model import find_model

pytestmark = pytest.mark.slow  # the harness takes seconds to import

QUESTIONS = [("def f(x):\n    ret", ["urn x", "zqzqz"], 0), ("import ", ["\x07\x07", "os"], 1)]


@pytest.fixture
def task(tmp_path):
    """A folder with a task of two questions."""
    lines = [{"question": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "questions.yaml").write_text(f"""
task: questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/questions.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
""")
    return tmp_path


def test_a_task_of_ones_own(moved, task, capsys, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(task / "cache"))
    command = ["--run", str(run(moved)), "--tasks", "questions", "--include", str(task), "--json"]
    assert lm_eval.main(command) == ExitCode.FINISHED
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["questions"]
    model, right = loaded(moved), []
    for text, choices, answer in QUESTIONS:
        before = [256, *text.encode()]
        wanted = [ScoreRequest([*before, *choice.encode()], len(before)) for choice in choices]
        right.append(np.argmax([one.log_likelihood for one in scores(model, wanted, 2)]) == answer)
    assert found["acc,none"] == np.mean(right)
    assert lm_eval.main(command[:-1]) == ExitCode.FINISHED
    assert f"questions  acc              {np.mean(right):.4f}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--tasks: nothing_such is not known; name its folder"):
        lm_eval.main([*command[:3], "nothing_such"])


def test_a_task_that_generates_is_refused_where_devices_share_rows(moved, task, capsys, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(task / "cache"))
    text = (
        (task / "questions.yaml").read_text().replace("multiple_choice", "generate_until").replace("acc", "exact_match")
    )
    (task / "answers.yaml").write_text(text.replace("task: questions", "task: answers"))
    command = ["--run", str(run(moved)), "--include", str(task), "--json", "mesh.context=2"]
    monkeypatch.setattr("jaxmnt.lm_eval.scores", lambda *_: pytest.fail("it ran a task before it refused"))
    with pytest.raises(ConfigError, match=r"^mesh\.context: generation needs whole rows"):
        lm_eval.main([*command, "--tasks", "questions,answers"])


def loaded(moved):
    return find_model(str(run(moved)), None).load(["mesh.data=1"] if len(jax.devices()) == 1 else [])


def test_what_the_harness_asks_for(moved):
    model = loaded(moved)
    asked = lambda *arguments: SimpleNamespace(args=arguments)
    named = find_model(str(run(moved)), None)
    adapter = lm_eval.adapter(named, model, 2)
    pairs = [("def ", "f"), ("", "x"), ("a" * 100, " b")]
    by_pair = adapter.loglikelihood([asked(*pair) for pair in pairs])
    assert all(value < 0 and greedy in (True, False) for value, greedy in by_pair)
    text = "some text that is longer than the window of this model, by far"
    (rolling,) = adapter.loglikelihood_rolling([asked(text)])
    ids = [256, *text.encode()]
    pieces = [ScoreRequest(ids[start : start + 33], 1) for start in range(0, len(ids) - 33, 32)]
    rest = len(ids) - 1 - 32 * len(pieces)
    pieces.append(ScoreRequest(ids[-33:], 33 - rest))
    assert rolling == pytest.approx(sum(one.log_likelihood for one in scores(model, pieces, 2)), rel=1e-5)
    greedy = adapter.generate_until([asked("def ", {"max_gen_toks": 6}), asked("x", {"max_gen_toks": 3})])
    again = adapter.generate_until([asked("x", {"max_gen_toks": 3, "do_sample": False})])
    assert greedy[1] == again[0] and len(greedy[1].encode()) <= 3 * 3
    (cut,) = adapter.generate_until([asked("def ", {"max_gen_toks": 6, "until": [greedy[0][1]]})])
    assert cut == greedy[0][: greedy[0].index(greedy[0][1])]
    sampled = {"max_gen_toks": 8, "do_sample": True, "temperature": 1.5}
    assert len(set(adapter.generate_until([asked("def ", sampled)] * 6))) > 2, "each its own, over batches"
    with pytest.raises(ConfigError, match="a request of the harness: the text to score is empty"):
        adapter.loglikelihood([asked("def ", "")])
    with pytest.raises(ConfigError, match="a task asks for 32 tokens, and the model's window of 32 must hold"):
        adapter.generate_until([asked("x", {"max_gen_toks": 32})])
    ((alone, _),) = lm_eval.adapter(named, model, 2, chat=True).loglikelihood([asked("def ", "f")])
    assert alone != by_pair[0][0], "a template begins the text itself"
