"""Evaluate a language model with the LM Evaluation Harness: on a small local task, or on the paper's six tasks.

    python examples/evaluate.py MODEL                # offline: which of two lines of Python comes next?
    python examples/evaluate.py MODEL --tasks paper  # downloads the tasks' data from the Hugging Face Hub

MODEL is a folder that `save_pretrained` wrote, with a tokenizer; train_trainer.py writes one. In a clone,
`pip install ".[evaluate,transformers]"` installs what the example needs. The harness shows progress bars and prints a
table. With a tiny model, the local task takes about 15 s on 2 CPU cores. Its result says nothing about a model's
quality.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

PAPER = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "sciq", "winogrande")
"""The tasks of the paper (arXiv 2506.23225). The paper evaluates them zero-shot and two-shot (`--fewshot 2`)."""
LOCAL = "next_line_of_python"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def need(name: str) -> Any:
    """Import a package, or end with a message that names the extras to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f'{error}; in a clone, run: pip install ".[evaluate,transformers]"') from error


def write_local_task(folder: Path, questions: int) -> None:
    """Write a task from Python's source files. A question shows three lines, and asks which of two lines comes next."""
    draw = random.Random(0)
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    lines = [line for file in files for line in file.read_text(errors="ignore").splitlines(True) if line.strip()]
    rows = []
    for _ in range(questions):
        at, other = draw.randrange(len(lines) - 4), draw.randrange(len(lines))
        choices, answer = [lines[at + 3], lines[other]], draw.randrange(2)
        context = "".join(lines[at : at + 3])
        rows.append({"context": context, "choices": choices if answer == 0 else choices[::-1], "answer": answer})
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(TASK.format(name=LOCAL, data=json.dumps(str(data))))


def evaluate(model: str, tasks: list[str], fewshot: int, limit: int | None, batch: int, device: str) -> str:
    """Run `tasks`, or the local task if there are none, and return the harness's table."""
    for name in ("transformers", "lm_eval", "mglu_ops.transformers"):  # mglu_ops.transformers registers MGLU models
        need(name)
    harness, models = need("lm_eval"), need("lm_eval.models.huggingface")
    manager = need("lm_eval.tasks").TaskManager
    with tempfile.TemporaryDirectory(prefix="mglu-evaluate-") as folder:
        if not tasks:
            write_local_task(Path(folder), limit or 200)
        results = harness.simple_evaluate(
            model=models.HFLM(pretrained=model, batch_size=batch, device=device),
            tasks=tasks or [LOCAL],
            task_manager=manager() if tasks else manager(include_path=folder, include_defaults=False),
            num_fewshot=fewshot,
            limit=limit,
            bootstrap_iters=0,
        )
    return str(need("lm_eval.utils").make_table(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with a model and its tokenizer")
    parser.add_argument("--tasks", nargs="+", default=[], help="names of the harness's tasks, or `paper` for the six")
    parser.add_argument("--fewshot", type=int, default=0, help="examples before each question")
    parser.add_argument("--limit", type=int, help="questions of each task (default: all; 200 of the local task)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    if not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"model: got {arguments.model!r}, must be a folder with a config.json")
    tasks = [task for name in arguments.tasks for task in (PAPER if name == "paper" else (name,))]
    if arguments.fewshot and not tasks:
        parser.error(f"--fewshot: got {arguments.fewshot}, must be 0 for the local task")
    start = time.perf_counter()
    sizes = (arguments.fewshot, arguments.limit, arguments.batch, arguments.device)
    print(evaluate(arguments.model, tasks, *sizes))
    print(f"evaluated {', '.join(tasks or [LOCAL])} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
