"""Tokenizers with the chat templates of well-known model families, cut down to what shapes a prompt.

Each is a demo tokenizer with the family's control tokens, or one without words of its own, as SentencePiece makes them.
"""

import json
import random
import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from engine.processing.checkpoint import DEMO_MODEL
from engine.processing.tokenizer import ChatTokenizer

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content }}
{%- else %}{%- for part in m.content or [] %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN3 = """\
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- if last.user < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- if tools or messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- for t in tools or [] %}{{ '\\n' + (t | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user and (m.reasoning_content or loop.last) %}
{{- '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- (m.content or '').split('</think>')[-1].lstrip('\\n') }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'user' or not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('' if enable_thinking else '<think>\\n\\n</think>\\n\\n') }}
{%- endif %}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for m in messages %}
{{- '<|start_header_id|>' + (m.role if m.role != 'tool' else 'ipython') + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}{% for t in tools %}{{ (t | tojson(indent=4)) + '\\n\\n' }}{% endfor %}{% endif %}
{%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

DEEPSEEK = """\
{{- '<｜begin▁of▁sentence｜>' + (messages[0].content if messages[0].role == 'system' else '') }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' + (m.content or '').split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + call.function.name }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

MISTRAL = """\
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set last = namespace(user=-1) %}
{%- for m in turns %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{{- '<s>' }}
{%- for m in turns %}
{%- if m.role == 'user' %}
{%- if loop.previtem and loop.previtem.role == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if tools and loop.index0 == last.user %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + (system if loop.index0 == last.user else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] ' + (m.tool_calls[0].function | tojson) + '</s>' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
{%- else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}
{%- endfor %}"""

GEMMA = """\
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<bos>' }}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (system if loop.first else '') }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

PLAIN = """\
{%- for t in tools or [] %}{{ 'Tool: ' + (t | tojson) + '\\n' }}{% endfor %}
{%- for m in messages %}
{{- m.role | capitalize + ': ' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ ' calls ' + (call.function | tojson) }}{% endfor %}
{{- '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

SEALED = CHATML + "{{ '' if add_generation_prompt else '<|endoftext|>' }}"
"""ChatML that closes a conversation which nobody is to continue."""

CONTROL = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "deepseek": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁call▁begin｜>"),
    ),
    "mistral": (
        *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
}
TEMPLATES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "deepseek": DEEPSEEK,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "plain": PLAIN,
    "sealed": SEALED,
}


def build_tokenizer(out: Path, name: str, **edits: Any) -> ChatTokenizer:
    """The template `name` with the control tokens of its family, on the demo model's vocabulary.

    edits: of tokenizer.json, `chat_template` of the template, `control` the tokens of the family.
    """
    description = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    return _write(out, description, name, **edits)


def build_sentencepiece(out: Path, name: str) -> ChatTokenizer:
    """The same without splitting into words: whole sentences are cut at once, with a space in front of each."""
    rng = random.Random(3)
    words = ["".join(rng.choices("abcdefghilmnoprstu", k=rng.randint(1, 7))) for _ in range(300)]
    corpus = [" ".join(rng.choices(words, k=9)) + rng.choice((".\n", ": ", "\n\n")) for _ in range(400)]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # type: ignore[assignment]
    trainer = trainers.UnigramTrainer(
        vocab_size=500,
        initial_alphabet=[*string.printable],
        special_tokens=["<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return _write(out, json.loads(tokenizer.to_str()), name)


def _write(out: Path, description: dict[str, Any], name: str, **edits: Any) -> ChatTokenizer:
    template = edits.pop("chat_template", TEMPLATES.get(name))
    control = edits.pop("control", CONTROL.get(name, ()))
    out.mkdir(parents=True, exist_ok=True)
    description |= edits
    known = {token["content"] for token in description["added_tokens"]}
    (out / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.add_special_tokens([token for token in control if token not in known])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (out / "tokenizer_config.json").write_text(json.dumps(config))
    (out / "config.json").write_text(json.dumps({"image_token_id": tokenizer.token_to_id("<|image_pad|>")}))
    return ChatTokenizer(out)
