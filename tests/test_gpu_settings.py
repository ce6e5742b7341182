"""What a process sets for XLA and NCCL before JAX starts, and the flags that this jaxlib would not take."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import command

from jaxmnt.config.load import parse_config
from jaxmnt.distributed import local_gpus
from jaxmnt.distributed.gpu_settings import SUCCESSORS, check_flags, prepare
from jaxmnt.errors import ConfigError, ExitCode

TIMEOUT = "--xla_gpu_nccl_termination_timeout_seconds"
GONE_EVERYWHERE = (
    "xla_gpu_graph_level", "xla_gpu_enable_triton_softmax_fusion", "xla_gpu_lhs_enable_gpu_async_tracker",
    "xla_gpu_enable_custom_fusions", "xla_gpu_enable_address_computation_fusion", "xla_gpu_cudnn_gemm_fusion",
    "xla_gpu_enable_nccl_per_stream_comms", "xla_gpu_enable_async_all_gather",
    "xla_gpu_executable_terminate_timeout_seconds",
)  # fmt: skip
"""From every supported jaxlib, though recipes that are still copied have them."""


def prepared(environment, gpus=8, **sections):
    found = dict(environment)
    prepare(parse_config(sections), found, gpus)
    return found


def test_a_process_on_gpus_sets_what_is_not_set():
    assert prepared({}) == {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "NCCL_DEBUG": "WARN", "XLA_FLAGS": f"{TIMEOUT}=3900",
    }  # fmt: skip
    given = {"NCCL_DEBUG": "INFO", "XLA_FLAGS": "--xla_backend_optimization_level=1"}
    found = prepared(given)
    assert found["NCCL_DEBUG"] == "INFO"
    assert found["XLA_FLAGS"] == f"--xla_backend_optimization_level=1 {TIMEOUT}=3900"
    given = {"XLA_FLAGS": f"{TIMEOUT}=5"}
    assert prepared(given)["XLA_FLAGS"] == given["XLA_FLAGS"]


def test_nothing_is_set_without_gpus_or_where_nobody_wants_it(monkeypatch):
    monkeypatch.setattr(local_gpus, "has_cuda_plugin", lambda: False)
    assert prepared({}, gpus=0) == {} == prepared({}, launch={"settings": "none"})


@pytest.mark.parametrize(
    ("environment", "has_plugin", "gpus", "has_driver", "platforms"),
    [
        ({}, True, 0, False, "cpu"),
        ({}, False, 0, False, None),
        ({}, True, 1, False, None),
        ({}, True, 0, True, None),
        ({"JAX_PLATFORMS": "cuda,cpu"}, True, 0, False, "cuda,cpu"),
    ],
)
def test_jax_keeps_to_the_cpu_where_its_plugin_is_there_for_plans_alone(
    monkeypatch, environment, has_plugin, gpus, has_driver, platforms
):
    """Where anything of a GPU is there, JAX has to say why it cannot be used."""
    monkeypatch.setattr(local_gpus, "has_cuda_plugin", lambda: has_plugin)
    monkeypatch.setattr(local_gpus, "gpus_here", lambda: gpus)
    monkeypatch.setattr(local_gpus, "_has_driver", lambda: has_driver)
    assert prepared(environment, gpus=0).get("JAX_PLATFORMS") == platforms


MISSING_DRIVER = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795785091.678130   30058 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be \
used.
"""
FAKE_JAX = """
import contextlib, os, sys
def say(text):
    with contextlib.suppress(OSError): os.write(2, text)
if sys.stderr: print("jax is here", file=sys.stderr)
say(sys.argv[1].encode() + b"E0000 something else\\n" + sys.argv[1].encode() + b"no end of line")
if "raises" in sys.argv: raise ValueError("a variable")
"""
FAKE_PLUGIN = """
import sys
from jax import say
def initialize(): say(sys.argv[1].encode() + b"initialized\\n")
"""
IMPORTING = """
import os, sys
from jaxmnt.distributed import quiet_plugin
quiet_plugin.has_cuda_plugin_without_gpu = lambda: "gpu" not in sys.argv
if "closed" in sys.argv: sys.stderr = os.close(2)
quiet_plugin.install()
try:
    import jax
    import jax_plugins.xla_cuda12 as plugin
    plugin.initialize()
    print(type(jax.__loader__).__name__, type(jax.__spec__.loader).__name__)
except ValueError as error:
    print("raised", error)
"""


@pytest.mark.parametrize(
    ("how", "out", "said"),
    [
        ((), "SourceFileLoader SourceFileLoader", "jax is here\nE0000 something else\nno end of lineinitialized\n"),
        (("raises",), "raised a variable", "jax is here\nE0000 something else\nno end of line"),
        (("closed",), "SourceFileLoader SourceFileLoader", ""),
        (
            ("gpu",),
            "SourceFileLoader SourceFileLoader",
            f"jax is here\n{MISSING_DRIVER}E0000 something else\n{MISSING_DRIVER}no end of line{MISSING_DRIVER}"
            "initialized\n",
        ),
    ],
)
def test_nothing_but_a_missing_driver_is_kept_back_where_there_is_no_gpu(tmp_path, how, out, said):
    for name, text in (("jax/__init__.py", FAKE_JAX), ("jax_plugins/xla_cuda12.py", FAKE_PLUGIN)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, MISSING_DRIVER, *how],
        capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=path, JAX_PLATFORMS=""),
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == (out, said)


def test_nccl_gives_up_later_than_the_watchdog():
    assert prepared({}, watchdog={"save_seconds": 7200})["XLA_FLAGS"] == f"{TIMEOUT}=7500"
    assert prepared({}, cluster={"nccl_timeout_seconds": 4000})["XLA_FLAGS"] == f"{TIMEOUT}=4000"
    with pytest.raises(ConfigError, match=r"cluster\.nccl_timeout_seconds: 3600 must be above the watchdog's longest"):
        parse_config({"cluster": {"nccl_timeout_seconds": 3600}})


def trouble(flags: str) -> str:
    try:
        check_flags({"XLA_FLAGS": flags, "PATH": os.environ["PATH"]})
    except ConfigError as error:
        return str(error)
    return ""


def test_flags_of_older_recipes_are_named_with_what_replaced_them():
    """Some of them are known to the older of the supported versions, which then say nothing or want another value."""
    successors = [name for name in SUCCESSORS.values() if name]
    with ThreadPoolExecutor(4) as pool:
        told = dict(zip(SUCCESSORS, pool.map(lambda name: trouble(f"--{name}=1"), SUCCESSORS), strict=True))
        later = list(pool.map(lambda name: trouble(f"--{name}=1"), successors))
    assert not [line for line in later if "does not know" in line]
    for name, successor in SUCCESSORS.items():
        if name in GONE_EVERYWHERE or "does not know" in told[name]:
            instead = f"set --{successor} instead" if successor else "remove it"
            assert told[name].startswith(f"XLA_FLAGS: this jaxlib does not know --{name} ({instead}"), told[name]


def test_every_wrong_flag_is_named_and_what_is_no_flag_too():
    told = trouble("--xla_gpu_graph_level=1 --xla_cpu_so_fast=true --xla_backend_optimization_level=0")
    assert "--xla_gpu_graph_level (set --xla_gpu_enable_command_buffer instead)" in told
    assert "--xla_cpu_so_fast (remove it, or correct its name)" in told and "optimization_level" not in told
    assert "Couldn't interpret value much for flag" in trouble("--xla_backend_optimization_level=much")
    assert 'Could not open file "xla_foo"' in trouble("xla_foo")
    assert trouble("--xla_backend_optimization_level=0") == trouble("") == ""


@pytest.mark.slow
@pytest.mark.parametrize("how", [("jaxmnt.train",), ("jaxmnt.train", "--dry-run"), ("jaxmnt.preflight",)])
def test_a_start_with_a_wrong_flag_ends_with_words(tiny_file, monkeypatch, how):
    module, *more = how
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_level=1")
    told = command(module, "--config", str(tiny_file), *more)
    assert told.returncode == ExitCode.CONFIG and "Traceback" not in told.stderr
    assert "this jaxlib does not know --xla_gpu_graph_level (set --xla_gpu_enable_command_buffer" in told.stderr
    if not more:
        monkeypatch.setenv("XLA_FLAGS", "")
        monkeypatch.setenv("JAX_OPTIMIZATION_LEVEL", "O9")
        told = command(module, "--config", str(tiny_file))
        assert told.returncode == ExitCode.CONFIG and "Traceback" not in told.stderr
        assert 'JAX does not accept a variable: Invalid value "O9"' in told.stderr
