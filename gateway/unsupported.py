"""Fields of OpenAI's, vLLM's and SGLang's APIs that pdserve does not implement. docs/openai.md explains the choice.

`IGNORED` ones cannot change the answer. `NEUTRAL` ones are accepted with the listed values, which ask for nothing,
and refused by name with any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "parallel_tool_calls",  # says how to call tools, and there are none
    }
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_calls": ([],),
    "tool_call_id": (),
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "store": (False,),
    "web_search_options": (),
    "moderation": (),
    "best_of": (1,),
    "suffix": ("",),
    # vLLM and SGLang
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_schema": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "request_id": (),  # the X-Request-ID header carries it
    "lora_path": (),
    "prompt_embeds": (),
}
