"""Shared fixtures. Eight virtual CPU devices stand in for a cluster; they must be set up before JAX is imported."""

import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    # Most of the time goes into compiling programs that run for milliseconds: LLVM need not optimise them, nor compile
    # their parts side by side. The emitters of fused loops take most of what remains, where they can be turned off.
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
# No test looks for the lines of Python that a program was traced from, which JAX would write beside each operation.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import atexit
import faulthandler
import functools
import gc
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from jaxmnt.config.load import apply_overrides, parse_config
from jaxmnt.data.preparation.inputs import Selection, Settings
from jaxmnt.data.preparation.run import build
from jaxmnt.telemetry.events import read_lines

# Programs of one device that several tests compile are compiled once, also across processes. The folder is private;
# scripts/test has one for all that it runs.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxmnt-test-cache-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

from jaxmnt.run.compile_cache import cache_single_cpu_programs_only  # imports JAX, which reads the variables

cache_single_cpu_programs_only()

# Only newer versions of JAX interpret Mosaic kernels on a CPU.
collect_ignore = ["test_mosaic.py"] if version("jaxlib").startswith("0.10.") else []

# A collection of garbage walks all that JAX keeps of the programs before.
gc.set_threshold(100_000, 20, 20)

# How long an example takes says nothing on a machine that does other things as well.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# Started in the background by a shell, this process ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]

TINY = {
    "data": {"global_batch_size": 16, "sequence_length": 32, "log_digest": True},
    "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 96},
    "train": {"steps": 20, "precision": "float32", "eval_tokens": None},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 4},
    "checkpoint": {"every_steps": 5},
    "telemetry": {"sinks": []},
}


def write_words(folder: Path, files: int, words: int, seed: int = 0) -> None:
    """Text with some structure, the same on every machine."""
    rng = np.random.default_rng(seed)
    vocabulary = ["".join(rng.choice(list("abcdefghij"), size)) for size in rng.integers(2, 7, 60)]
    for number in range(files):
        chosen = rng.choice(vocabulary, words, p=np.arange(60, 0, -1) / 1830)
        (folder / f"{number:03d}.txt").write_text(" ".join(chosen) + "\n")


@pytest.fixture(autouse=True)
def quick_tests_compile_for_cpus_only(request, monkeypatch):
    """The environment of the quick tests has no compiler for GPUs, so they must not use one where it exists."""
    if not {"slow", "exhaustive"} & {*request.keywords}:
        from jax.experimental import topologies

        refuse = lambda *arguments, **options: pytest.fail(
            "a test that compiles for GPUs must be marked slow or exhaustive"
        )
        monkeypatch.setattr(topologies, "get_topology_desc", refuse)


@pytest.fixture(autouse=True)
def signals_are_restored():
    """A command that is called in this process may end with signals ignored, and so would what later tests start."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """Prepared data of 40 documents in small shards, about a tenth of it held out."""
    folder = tmp_path_factory.mktemp("text")
    write_words(folder, files=40, words=150)
    output = tmp_path_factory.mktemp("data") / "words"
    settings = Settings(eval_fraction=0.15, shard_tokens=4096, part_bytes=10_000)
    build(Selection([folder]), output, settings, lambda *progress: None)
    return output


@pytest.fixture
def tiny(prepared, tmp_path):
    """Makes a config of a tiny model on the prepared data; arguments are overrides."""

    def make(*overrides: str):
        tree = {name: dict(section) for name, section in TINY.items()}
        tree["data"]["path"] = str(prepared)
        tree["run"] = {"dir": str(tmp_path / "run")}
        apply_overrides(tree, list(overrides))
        return parse_config(tree)

    return make


@pytest.fixture
def tiny_file(prepared, tmp_path) -> Path:
    """The same config as a file, for commands."""
    tree = {name: dict(section) for name, section in TINY.items()}
    tree["data"]["path"] = str(prepared)
    tree["run"] = {"dir": str(tmp_path / "run")}
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(tree))
    return path


_PROGRAMS: dict[tuple, tuple] = {}


@pytest.fixture
def shared_programs(monkeypatch):
    """Runs in this process that compute the same share their compiled steps and initial state. For tests of what a run
    does around its steps."""
    import jax
    import jax.numpy as jnp

    from jaxmnt.run import compiling

    elsewhere = {"run": True, "checkpoint": True, "data": {"path", "stage_dir"}, "train": {"stop_after"}}
    """What no step reads: where a run reads and writes, and when it saves and stops."""
    compile_program = compiling.compile_program

    def shared(config, data_vocab_size, devices=None, hosts=None, resolve=None):
        key = (config.model_dump_json(exclude=elsewhere), data_vocab_size, None if devices is None else tuple(devices))
        if key not in _PROGRAMS:
            program = compile_program(config, data_vocab_size, devices, hosts, resolve)
            _PROGRAMS[key] = program, functools.cache(program.init)
            return program
        program, initial = _PROGRAMS[key]
        again = replace(program, spec=resolve(replace(program.spec, config=config)))
        copied = lambda: jax.tree.map(jnp.copy, initial())  # a step takes the state that it is given
        vars(again)["init"] = lambda parts=None: {part: copied()[part] for part in parts or again.abstract_state}
        vars(again)["evaluate"] = lambda *given: program.evaluate(*given)
        return again

    monkeypatch.setattr(compiling, "compile_program", shared)


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, prepared):
    """The config of a run of 20 steps in one go, on one device, with checkpoints 10, 15 and 20. Not to be changed."""
    import jax

    from jaxmnt.train import train

    tree = {name: dict(section) for name, section in TINY.items()}
    tree["data"]["path"] = str(prepared)
    tree["run"] = {"dir": str(tmp_path_factory.mktemp("whole") / "run")}
    tree["train"]["eval_every"] = 10
    config = parse_config(tree)
    assert train(config, devices=jax.devices()[:1]) == 0
    return config


def in_tiers(quick: set[int], matrix: list) -> list:
    """The cases of a matrix. Those at the places `quick` are quick tests. Of the others every third is a slow test. The
    rest is exhaustive, because CI need not run whole matrices."""
    values = [case if isinstance(case, tuple) else (case,) for case in matrix]
    marks = [() if place in quick else [pytest.mark.slow, pytest.mark.exhaustive] for place in range(len(matrix))]
    for place in [place for place in range(len(matrix)) if place not in quick][::3]:
        marks[place] = pytest.mark.slow
    return [pytest.param(*case, marks=mark) for case, mark in zip(values, marks, strict=True)]


def metrics(run_dir: Path | str, kind: str = "train") -> list[dict]:
    return _records(Path(run_dir) / "metrics.jsonl", kind)


def events(run_dir: Path | str, kind: str, process: int = 0) -> list[dict]:
    return _records(Path(run_dir) / "events" / f"{process}.jsonl", kind)


def _records(path: Path, kind: str) -> list[dict]:
    """Of a file that is there, and that may be written at this moment."""
    path.stat()  # raises if it is not: no file is not the same as no such record
    return [record for record in read_lines(path) if record["kind"] == kind]


def until(ready: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits until something is true, which it mostly is at once."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def losses(run_dir: Path | str) -> list[float]:
    return [record["loss"] for record in metrics(run_dir)]


def command(*arguments: str, devices: int = 1, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess:
    """Runs `python -m jaxmnt.…` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=dict(os.environ, JAX_NUM_CPU_DEVICES=str(devices), **environment),
    )


def launch(config: Path, *overrides: str, processes: int, devices: int) -> subprocess.CompletedProcess:
    """Runs a config in several processes on this machine, with so many virtual devices each."""
    return command(
        "jaxmnt.launch", "local", "--processes", str(processes), "--devices-per-process", str(devices),
        "--", "--config", str(config), *overrides,
    )  # fmt: skip


def check_same_checkpoints(one: Path, other: Path) -> dict[str, np.ndarray]:
    """The arrays of two runs' newest checkpoints are equal, bit for bit. Returns those of the first by name."""
    from jaxmnt.checkpoint.arrays import Reader
    from jaxmnt.checkpoint.commit import newest_valid

    arrays = []
    for run in (one, other):
        checkpoint = newest_valid(run / "checkpoints")
        reader = Reader(checkpoint)
        arrays.append({name: np.asarray(reader.read(name)) for name in sorted(checkpoint.manifest.arrays)})
    assert arrays[0].keys() == arrays[1].keys()
    for name, array in arrays[0].items():
        np.testing.assert_array_equal(array, arrays[1][name], err_msg=name)
    return arrays[0]


def check_legs(config: Path, folder: Path, settings: tuple[str, ...], legs: list[tuple[int, str, int | None]]) -> Path:
    """A run that goes on in each leg (processes, overrides, step to stop after) on another mesh of eight devices has
    the batches and losses of a run on one device. Returns its directory."""
    plain, run = folder / "plain", folder / "run"
    result = command("jaxmnt.train", "--config", str(config), *settings, f"run.dir={plain}")
    assert result.returncode == 0, result.stderr
    for processes, overrides, stop in legs:
        stops = [] if stop is None else [f"train.stop_after={stop}"]
        result = launch(config, *settings, *overrides.split(), *stops, processes=processes, devices=8 // processes)
        assert result.returncode == (0 if stop is None else 75), result.stderr
    assert len(events(run, "restore")) == len(legs) - 1
    np.testing.assert_allclose(losses(run), losses(plain), rtol=1e-5)
    digests = [[line["batch_digest"] for line in metrics(path)] for path in (run, plain)]
    assert digests[0] == digests[1]
    return run


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory, prepared) -> Path:
    """The directory of a run of 20 steps in two processes of one device each. Not to be changed."""
    folder = tmp_path_factory.mktemp("two")
    tree = {name: dict(section) for name, section in TINY.items()}
    tree["data"]["path"] = str(prepared)
    (folder / "tiny.yaml").write_text(json.dumps(tree))
    result = launch(folder / "tiny.yaml", f"run.dir={folder / 'run'}", processes=2, devices=1)
    assert result.returncode == 0, result.stderr
    return folder / "run"


LAUNCH = """
import sys
from jaxmnt.launch.local import launch, local_run
from jaxmnt.launch.restarts import Restarts
processes, restarts, *counts = map(int, sys.argv[1].split(","))
sys.exit(launch(local_run(sys.argv[2:], 1, ("sabotage",)), processes, Restarts(restarts, counts)))
"""


@pytest.fixture
def sabotaged(tiny_file, tmp_path):
    """Starts processes with parts slowed down; whatever still runs at the end is ended."""
    started = []

    def start(how: str, *overrides: str, **told) -> subprocess.Popen:
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        for mark in marks.iterdir():
            mark.unlink()
        environment = {"SABOTAGE": json.dumps(told | {"marks": str(marks)})}
        path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, how, "--config", str(tiny_file), *overrides],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(os.environ, PYTHONPATH=path, **environment),
        )  # fmt: skip
        started.append(launcher)
        return launcher

    yield start
    for launcher in started:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(30)


def child_of(launcher: subprocess.Popen, number: int) -> int:
    """The id of the launcher's process with this number, by its environment."""
    for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        if f"JAX_PROCESS_ID={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return int(pid)
    raise AssertionError("no such process")


def pytest_collection_modifyitems(config, items):
    """The long tests come first, so that no worker is left with one of them when the others have ended.

    JAXMNT_TEST_SHARD=K/N selects the K-th of N shards of the tests, by a digest of each test's name.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if shard := os.environ.get("JAXMNT_TEST_SHARD"):
        number, shards = map(int, shard.split("/"))
        is_ours = lambda item: zlib.crc32(item.nodeid.encode()) % shards == number - 1
        config.hook.pytest_deselected(items=[item for item in items if not is_ours(item)])
        items[:] = [item for item in items if is_ours(item)]


def pytest_sessionstart(session):
    """What ends this process in the middle of a test says where: os._exit, and memory that runs out."""
    told, ends, here = os.dup(2), os._exit, os.getpid()

    def tell(what: str) -> None:
        os.write(told, f"{what} during {os.environ.get('PYTEST_CURRENT_TEST', 'no test')}\n".encode())
        faulthandler.dump_traceback(told, all_threads=True)

    def tell_and_exit(code):
        if os.environ.get("PYTEST_CURRENT_TEST") and os.getpid() == here:
            tell(f"os._exit({code})")
        ends(code)

    os._exit = tell_and_exit
    threading.Thread(target=_watch_memory, args=(tell, ends), name="memory", daemon=True).start()


MAX_WORKER_BYTES = 10 * 2**30
"""A worker of the tests takes up to 3 GB. Without this limit the kernel would kill one without a word."""


def _watch_memory(tell, ends) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    limits = [MAX_WORKER_BYTES // 2, MAX_WORKER_BYTES]
    while True:
        time.sleep(1)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        if resident > limits[0]:
            kinds = Counter(type(one).__qualname__ for one in gc.get_objects()).most_common(8)
            tell(f"this process takes {resident / 2**30:.1f} GiB; most objects: {kinds}")
            limits.pop(0)
        if not limits:
            ends(1)


def pytest_sessionfinish(session, exitstatus):
    """In CI a skipped test is a failure: nothing may pass by not having run.

    A shard in which no test has the marks that were asked for has not failed.
    """
    if os.environ.get("JAXMNT_TEST_SHARD") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = 1


@pytest.fixture(scope="session")
def project(tmp_path_factory, prepared):
    """A folder with data and a run of ten steps, started in it: no path of its config is absolute."""
    import jax

    from jaxmnt.errors import ExitCode
    from jaxmnt.train import train

    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(prepared, folder / "data")
    tree = {name: dict(section) for name, section in TINY.items()}
    apply_overrides(tree, ["run.dir=runs/a", "data.path=data", "checkpoint.dir=kept/a", "train.stop_after=10"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(parse_config(tree), devices=jax.devices()[:1]) == ExitCode.STOPPED
    return folder


@pytest.fixture
def moved(project, tmp_path, monkeypatch):
    """A copy of the project without its data, seen from another folder."""
    shutil.copytree(project, tmp_path / "moved", ignore=shutil.ignore_patterns("data"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "moved"


def run_in(folder: Path) -> Path:
    return folder / "runs" / "a"
