"""Chat templates of model families with tools and thoughts, cut down to what shapes calls, and answers in their form.

They follow the published templates of the families; the checkpoints themselves are not here.
"""

from dataclasses import dataclass
from pathlib import Path

from engine.processing.tokenizer import ChatTokenizer
from tests.engine.processing.chat_templates import build_tokenizer

SHOWN = "{%- for t in tools or [] %}{{ '\\n' + (t | tojson) }}{% endfor %}"

HERMES = (
    "{{- '<|im_start|>system' }}"
    + SHOWN
    + """{{- '<|im_end|>\\n' }}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

LLAMA = (
    "{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    + SHOWN
    + """{{- '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content or '') | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
)

MISTRAL_LIST = """\
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']</s>') }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""

MISTRAL_ARGS = """\
{{- '<s>' }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}
{%- for call in m.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{ '</s>' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ m.content + '</s>' }}{% endif %}
{%- endfor %}"""

DEEPSEEK_R1 = (
    "{{- '<｜begin▁of▁sentence｜>' }}"
    + SHOWN
    + """
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.tool_calls %}
{{- '<｜Assistant｜>' + (m.content or '') + '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '\\n' if not loop.first }}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments }}
{{- '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
)

GLM = (
    "{{- '[gMASK]<sop><|system|>' }}"
    + SHOWN
    + """
{%- for m in messages %}
{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}
{{- '<think>' + (m.reasoning_content or '') + '</think>\\n' }}
{%- endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for k, v in call.function.arguments.items() %}
{{- '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}
{{- '' if enable_thinking else '<think></think>\\n' }}{% endif %}"""
)

KIMI = (
    "{{- '<|im_system|>tools' }}"
    + SHOWN
    + """{{- '<|im_end|>' }}
{%- for m in messages %}
{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + (m.content or '') }}
{%- if m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0 | string }}
{{- '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""
)

GEMMA4 = (
    "{{- '<bos><|turn>system' }}"
    + SHOWN
    + """{{- '<turn|>\\n' }}
{%- for m in messages %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + '{' }}
{%- for k, v in call.function.arguments.items() %}
{{- ',' if not loop.first }}{{ k + ':' + ('<|"|>' + v + '<|"|>' if v is string else v | tojson) }}
{%- endfor %}
{{- '}<tool_call|>' }}
{%- endfor %}
{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}
{{- '' if enable_thinking else '<|channel>thought\\n<channel|>' }}{% endif %}"""
)

HARMONY = (
    "{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}"
    + SHOWN
    + """{{- '<|end|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- elif m.tool_calls %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
)

MAGISTRAL = """\
{{- '<s>[SYSTEM_PROMPT]Think between [THINK] and [/THINK].[/SYSTEM_PROMPT]' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- else %}
{{- '[THINK]' + m.reasoning_content + '[/THINK]' if m.reasoning_content }}{{ m.content + '</s>' }}
{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Family:
    """A family's template, its special tokens, and an answer with two calls in its form."""

    template: str
    special: tuple[str, ...]
    answer: str
    """Calls f(s="12", n=3) and g() behind the text `Let me see.`, if the form allows one."""
    content: str = "Let me see."
    calls: tuple[tuple[str, str], ...] = (("f", '{"s": "12", "n": 3}'), ("g", "{}"))

    def tokenizer(self, out: Path) -> ChatTokenizer:
        return build_tokenizer(out, "", control=self.special, chat_template=self.template)


ARGUMENTS = '{"s": "12", "n": 3}'
MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
)

FAMILIES = {
    "hermes": Family(
        HERMES,
        (),
        "Let me see.\n<tool_call>\n"
        f'{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
    "llama": Family(
        LLAMA,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        f'{{"name": "f", "parameters": {ARGUMENTS}}}',
        "",
        (("f", ARGUMENTS),),
    ),
    "mistral list": Family(
        MISTRAL_LIST,
        MISTRAL_TOKENS,
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]',
        "",
    ),
    "mistral args": Family(
        MISTRAL_ARGS, MISTRAL_TOKENS, f"Let me see.[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}"
    ),
    "deepseek": Family(
        DEEPSEEK_R1,
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        "I think\n</think>\n\nLet me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "glm": Family(
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
        "Let me see.\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
    ),
    "kimi": Family(
        KIMI,
        (
            *("<|im_system|>", "<|im_middle|>", "<|im_user|>", "<|im_assistant|>", "<|tool_calls_section_begin|>"),
            *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
            "<|tool_call_end|>",
        ),
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "gemma 4": Family(
        GEMMA4,
        ("<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
        'Let me see.<|tool_call>call:f{s:<|"|>12<|"|>,n:3}<tool_call|><|tool_call>call:g{}<tool_call|>',
    ),
    "harmony": Family(
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        "<|channel|>analysis<|message|>I think<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{{}}",
    ),
    "magistral": Family(MAGISTRAL, MISTRAL_TOKENS, "[THINK]I think[/THINK]Yes.", "Yes.", ()),
}
