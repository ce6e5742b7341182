"""The kit for evidence from GPUs, rehearsed on CPU devices by two processes."""

import getpass
import json
import os
import re
import socket
import subprocess
import sys

import pytest
from conftest import ROOT

from jaxmnt.distributed.identity import VARIABLES


@pytest.mark.exhaustive
def test_two_processes_make_one_report_without_names(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"coordinator": f"127.0.0.1:{server.getsockname()[1]}", "processes": "2"}
    command = [
        sys.executable, str(ROOT / "benchmarks" / "cluster_report.py"), "--rehearse", "--folder", str(tmp_path),
        "--only", "checks", "losses", "resume",
    ]  # fmt: skip

    def start(number: int) -> subprocess.Popen:
        variables = {VARIABLES[name]: text for name, text in (place | {"process_id": str(number)}).items()}
        return subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True)

    processes = [start(number) for number in range(2)]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], (errors, (tmp_path / "log-0.txt").read_text())
    text = (tmp_path / "cluster_report.json").read_text()
    report = json.loads(text)
    assert report["processes"] == 2 and list(report["parts"]) == ["checks", "losses", "resume"]
    assert report["parts"]["losses"]["largest_relative_difference"] < 1e-5
    assert report["parts"]["resume"]["losses_equal_those_of_an_uninterrupted_run"]
    assert report["parts"]["resume"]["exit_code_of_process_0"] != 0, "it has lost a peer"
    page = (tmp_path / "cluster_report.html").read_text()
    for secret in (socket.gethostname(), str(tmp_path), str(ROOT), "127.0.0.1"):
        assert secret not in text + page
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)
    assert "resume: ok" in page
