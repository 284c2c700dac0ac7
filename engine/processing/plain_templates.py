"""Chat templates of models whose checkpoints have none: what their processors make of a conversation."""

CONTENTS = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The texts of the messages: of DeepSeek-OCR, and of embedding models and encoders, whose inputs are not rendered."""

LINES = "{% for message in messages %}{{ message.content + '\\n' }}{% endfor %}"
"""A line break behind each message: of PaliGemma."""

DEEPSEEK = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|Assistant|>: ' + message.content + '<｜end▁of▁sentence｜>' }}"
    "{% elif message.role == 'user' %}{{ '<|User|>: ' + message.content + '\\n\\n' }}"
    "{% else %}{{ message.content + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>:{% endif %}"
)
"""The conversation `deepseek` of DeepSeek-VL2."""
