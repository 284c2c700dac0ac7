"""Mixes: which tasks a stage of the training draws, and how often."""

from collections.abc import Callable

from tests.demo_model.tasks.chat import chat
from tests.demo_model.tasks.dense_images import counting_wordings, dense_images, describing_wordings
from tests.demo_model.tasks.images import images
from tests.demo_model.tasks.json_objects import json_object
from tests.demo_model.tasks.reasoning import list_operations, sums
from tests.demo_model.tasks.retrieval import short_retrieval
from tests.demo_model.tasks.sample import Sample
from tests.demo_model.tasks.thinking import thinking, thinking_about_facts, thinking_in_conversation
from tests.demo_model.tasks.tool_calls import rare_tool_calls, tool_calls
from tests.demo_model.world.draws import Draws

Task = Callable[[Draws], Sample]
Mix = tuple[tuple[Task, float], ...]
"""Tasks with their weights, which need not add up to 1."""

BASE: Mix = (
    (images, 0.37),
    (short_retrieval, 0.13),
    (chat, 0.17),
    (sums, 0.09),
    (list_operations, 0.06),
    (tool_calls, 0.13),
    (json_object, 0.04),
    (thinking_about_facts, 0.01),
)
TEXT: Mix = (
    (short_retrieval, 0.50),
    (chat, 0.18),
    (sums, 0.03),
    (list_operations, 0.09),
    (tool_calls, 0.13),
    (json_object, 0.07),
)
THINKING: Mix = (
    (thinking, 0.45),
    (images, 0.17),
    (short_retrieval, 0.07),
    (chat, 0.13),
    (sums, 0.04),
    (list_operations, 0.03),
    (tool_calls, 0.08),
    (json_object, 0.03),
)
IMAGES: Mix = (
    (dense_images, 0.64),
    (short_retrieval, 0.07),
    (chat, 0.07),
    (sums, 0.045),
    (list_operations, 0.045),
    (rare_tool_calls, 0.075),
    (json_object, 0.02),
    (thinking, 0.02),
    (thinking_in_conversation, 0.015),
)
IMAGES_LAST: Mix = (
    (dense_images, 0.34),
    (thinking, 0.22),
    (thinking_in_conversation, 0.08),
    (short_retrieval, 0.08),
    (chat, 0.08),
    (sums, 0.05),
    (list_operations, 0.03),
    (rare_tool_calls, 0.09),
    (json_object, 0.03),
)
OTHERS: Mix = tuple((task, 0.8 * weight) for task, weight in IMAGES_LAST[1:])
COUNTING: Mix = ((counting_wordings, 0.20), (dense_images, 0.27), *OTHERS)
DESCRIBING: Mix = ((describing_wordings, 0.42), (dense_images, 0.22), *OTHERS)
