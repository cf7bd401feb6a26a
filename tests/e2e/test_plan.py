"""The flags that `prefix-proxy plan` prints are flags that a real vLLM takes, the longer context among them."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from proxy.commands import main
from tests import model_configs as known
from tests.e2e.conftest import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Parses the flags as `vllm serve` does, then makes the model's configuration with the override and the length.
READER = """
import json, sys
from vllm.config import ModelConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[2:])
asked = {"hf_overrides": args.hf_overrides, "max_model_len": args.max_model_len}
model = ModelConfig(model=sys.argv[1], dtype="float32", **asked)
print("READ", json.dumps([model.max_model_len, model.hf_config.rope_parameters["rope_type"], args.kv_offloading_size]))
"""


def test_a_real_vllm_takes_every_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """
    A plan with a context of twice the native one, keys and values in FP8 and too many users for the card.
    """
    file = tmp_path / "config.json"
    file.write_text(json.dumps(known.QWEN25_7B))
    words = ["--gpu", "4090", "--gpus", "2", "--users", "64", "--context", "65536", "--kv-cache-dtype", "fp8", "--json"]
    assert main(["plan", str(file), *words]) == 0
    flags = [
        word for each in json.loads(capsys.readouterr().out)["plan"]["flags"] for word in shlex.split(each["text"])
    ]
    made = environment("qwen2tiny")
    command = [str(made.python), "-c", READER, str(made.model("qwen2tiny")), *flags]
    environ = {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=600)
    read = [line for line in ended.stdout.splitlines() if line.startswith("READ ")]
    assert read, ended.stderr[-2000:]
    length, kind, offloading = json.loads(read[0].removeprefix("READ "))
    assert (length, kind) == (65536, "yarn") and offloading > 0
