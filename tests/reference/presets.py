"""Writes presets.json, the config.json of every preset, whose parameters make.py then counts: run it before make.py."""

import json
from pathlib import Path

from jaxmnt.config.load import parse_config
from jaxmnt.config.model import presets
from jaxmnt.huggingface.config import write_config


def main():
    models = {name: parse_config({"model": {"preset": name}}).model for name in presets()}
    written = {name: {"config": write_config(model, {}), "parameters": 0} for name, model in models.items()}
    Path(__file__).with_name("presets.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
