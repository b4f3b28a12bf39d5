"""transformers' `generate` in a process of its own: a Worker that computes one static batch a request.

    python -m bench.engine.hf_generate --model DIR --threads 2

A request is {"prompts": [[ids], ...], "max_tokens": n} with prompts of one length; the answer has first_s, the time of
the same batch with one token, and total_s. Weights in float32, in which processors without native bfloat16 are faster.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.arguments import positive
from bench.engine.worker import answer_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=positive, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)

    def generate_s(prompts: torch.Tensor, max_tokens: int) -> float:
        begin = time.perf_counter()
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
        )
        return time.perf_counter() - begin

    def measure(request: dict[str, Any]) -> dict[str, float]:
        prompts = torch.tensor(request["prompts"])
        first_s = generate_s(prompts, 1)
        last = request["max_tokens"]
        return {"first_s": first_s, "total_s": generate_s(prompts, last) if last > 1 else first_s}

    with torch.inference_mode():
        answer_lines(measure)


if __name__ == "__main__":
    main()
