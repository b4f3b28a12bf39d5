"""What transformers' own model answers greedily, in float32, to a spread of prompts: the truth for every path of ours.

Computed once, by one prompt at a time with transformers' KV cache, and kept in the user's cache directory under the
versions, weights and source of this file. Prompts cover the edges of blocks and chunks and several scripts.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from engine.checkpoint import DEFAULT_MODEL, cache_dir, resolve_model, weights_revision

NUM_NEW_TOKENS = 24
NUM_NEW_TOKENS_LONG = 8  # of the prompt of 2,000 tokens
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 511, 512, 513, 2000)
CHATS = {
    "english question": "What is the capital of France, and what is it famous for?",
    "english story": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "arithmetic": "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "chinese question": "请用三句话介绍一下中国的长城。",
    "chinese list": "列出五种常见的水果,并说明它们的颜色。",
    "code": "Fix this function:\n\ndef mean(xs):\n\treturn sum(xs) / len(x)\n",
    "code in another language": "Explain: `for (int i = 0; i < n; ++i) { a[i] += b[i] * c; }`",
    "emoji": "Translate into words: 🐱 + 🐟 = ❤️, 👩‍🚀🚀🌕",
    "mixed scripts": "Say hello in Русский, العربية, हिन्दी, 日本語 and 한국어. 🎉",
    "spaces and digits": "Sum   these:\n\n  12\n   7\n 1000\n\n\tTotal:   ",
}
CASE_NAMES = (*CHATS, *(f"{length} tokens" for length in LENGTHS))


@dataclass(frozen=True, slots=True)
class ReferenceCase:
    """A prompt and its greedy continuation, end-of-text ids not stopping it."""

    name: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@cache
def reference_cases() -> tuple[ReferenceCase, ...]:
    """All cases of the default model; takes a minute or two the first time."""
    model_dir = resolve_model(DEFAULT_MODEL)
    key = json.dumps([version("transformers"), version("torch"), weights_revision(model_dir)]).encode()
    digest = hashlib.sha256(key + Path(__file__).read_bytes()).hexdigest()[:16]
    file = cache_dir().parent / "reference" / f"{digest}.json"
    if not file.is_file():
        cases = _compute(model_dir, build_prompts(model_dir))
        _write_atomically(file, json.dumps([asdict(case) for case in cases]))
    return tuple(
        ReferenceCase(c["name"], tuple(c["prompt_ids"]), tuple(c["output_ids"])) for c in json.loads(file.read_text())
    )


def reference_case(name: str) -> ReferenceCase:
    """The case called `name`, one of CASE_NAMES."""
    return next(case for case in reference_cases() if case.name == name)


def build_prompts(model_dir: Path) -> dict[str, list[int]]:
    """Name to token ids: chats through the model's template, and running text cut to exact lengths."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    prompts = {}
    for name, text in CHATS.items():
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        prompts[name] = tokenizer.encode(chat, add_special_tokens=False)
    writers = (english_lines, code_lines, chinese_lines)
    for i, length in enumerate(LENGTHS):
        prompts[f"{length} tokens"] = _exactly(
            length, writers[i % len(writers)](random.Random(length)), tokenizer.encode
        )
    return prompts


def english_lines(rng: random.Random) -> Iterator[str]:
    animals, places = ("seals", "gulls", "whales", "otters", "terns"), ("bay", "harbour", "cape", "reef", "lagoon")
    for day in count(1):
        yield (
            f"On day {day} the crew counted {rng.randint(2, 99)} {rng.choice(animals)} near the {rng.choice(places)}, "
            f"and the {rng.choice(('cook', 'mate', 'captain', 'doctor'))} wrote it down. "
        )


def chinese_lines(rng: random.Random) -> Iterator[str]:
    for day in count(1):
        animal, place = rng.choice(("海豹", "海鸥", "鲸鱼")), rng.choice(("海湾", "港口", "礁石"))
        yield f"第{day}天,船员们在{place}附近看到了{rng.randint(2, 99)}只{animal}。"


def code_lines(rng: random.Random) -> Iterator[str]:
    for i in count(1):
        name = rng.choice(("area", "total", "scale", "clip", "mean"))
        operation = rng.choice("+-*/")
        yield f"def {name}_{i}(x, y={rng.randint(1, 50)}):\n    return x {operation} (y + {rng.randint(1, 9)})\n\n"


def _exactly(length: int, lines: Iterator[str], encode: Callable[[str], list[int]]) -> list[int]:
    text = ""
    while len(ids := encode(text)) < length:
        text += next(lines)
    return ids[:length]


def _compute(model_dir: Path, prompts: dict[str, list[int]]) -> list[ReferenceCase]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    cases = []
    for name, prompt in prompts.items():
        ids = torch.tensor([prompt])
        num_new = NUM_NEW_TOKENS if len(prompt) < 1000 else NUM_NEW_TOKENS_LONG
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=0
            )
        cases.append(ReferenceCase(name, tuple(prompt), tuple(out[0, len(prompt) :].tolist())))
    return cases


def _write_atomically(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(file)
