"""Train a small SwiMGLU Llama, serve it with vLLM, and ask its HTTP server to continue a text.

    python examples/serve_vllm.py --prompt "def main("

Without a model in `--model`, the example first runs train_trainer.py. It then starts vLLM's server on a free port, asks
it as any client of OpenAI's API does, prints the text, and ends the server. Training takes about a minute on 2 CPU
cores, and vLLM takes up to a minute to start; its log is written beside the model. In a clone, `make serve` installs
this package into the Python that has vLLM and runs the example; mglu_ops/vllm/README.md says which vLLM to install.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import torch

MODEL = "build/examples/mglu-llama-frozen"  # as train_trainer.py writes it
SECONDS_TO_START = 240
ON_A_GPU = ["--dtype", "bfloat16", "--kv-cache-memory-bytes", "64M", "--gpu-memory-utilization", "0.02"]
"""Without these, vLLM takes nearly all memory of a GPU. It takes the size, and checks that the share is free."""


def main() -> None:
    options = parse_options()
    check_vllm()
    model = Path(options.model)
    if not (model / "config.json").is_file():
        if options.model != MODEL:
            raise SystemExit(f"--model: no model in {model}; without this option, the example trains one")
        subprocess.run([sys.executable, Path(__file__).with_name("train_trainer.py")], check=True)
    with serving(model) as url:
        start = time.perf_counter()
        text = complete(url, options.prompt, options.steps)
        print(f"answered in {time.perf_counter() - start:.2f} s:\n{options.prompt}{text}")


def check_vllm() -> None:
    """Say what is missing to serve a model, before anything is trained."""
    if find_spec("vllm") is None:
        raise SystemExit(f"vLLM is not installed in {sys.executable}; mglu_ops/vllm/README.md says how to install it")
    if not any(plugin.value.startswith("mglu_ops.") for plugin in entry_points(group="vllm.general_plugins")):
        raise SystemExit("mglu_ops is not installed, so that vLLM does not find its plugin; in a clone, pip install .")


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Start vLLM's HTTP server with a model, give its address once it answers, and end it afterwards."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", model.with_name(f"{model.name}.vllm.log")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]  # as `vllm serve MODEL`
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "mglu"]
    command += ON_A_GPU if torch.cuda.is_available() else []
    local = {"VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # needs no network
    local["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; on a CPU, vLLM would take nearly all memory
    with log.open("w") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**local, **os.environ}, start_new_session=True
        )
    try:
        start = time.perf_counter()
        while not is_healthy(url):
            seconds = time.perf_counter() - start
            if server.poll() is not None or seconds > SECONDS_TO_START:
                raise SystemExit(f"{log.read_text()[-3000:]}\nvLLM gave no answer in {seconds:.0f} s; its log is {log}")
            time.sleep(0.5)
        print(f"vLLM serves {model} at {url} after {time.perf_counter() - start:.0f} s", flush=True)
        yield url
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with suppress(ProcessLookupError):  # processes of vLLM that have not ended with the server
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def complete(url: str, prompt: str, steps: int) -> str:
    """Ask for the most probable continuation of a prompt."""
    asked = {"model": "mglu", "prompt": prompt, "max_tokens": steps, "temperature": 0, "ignore_eos": True}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), head)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="folder of a model with its tokenizer")
    parser.add_argument("--prompt", default="    def __init__(self", help="text to continue")
    parser.add_argument("--steps", type=int, default=100, help="tokens to generate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
