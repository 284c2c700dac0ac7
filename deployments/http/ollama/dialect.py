"""OLLAMA: Ollama's API."""

from deployments.http.dialect import Dialect
from deployments.http.ollama.chat_wire import parse_chat
from deployments.http.ollama.embed import EMBED, EMBEDDINGS, Embeds
from deployments.http.ollama.embed_wire import parse_embed, parse_embeddings
from deployments.http.ollama.error_form import ERRORS
from deployments.http.ollama.generate_wire import parse_generate
from deployments.http.ollama.generation import CHAT, GENERATE, ID_PREFIX, Generations
from deployments.http.ollama.lines_encoder import CONTENT_TYPE
from deployments.http.ollama.model_pages import ModelPages
from deployments.http.ollama.show_wire import parse_show

OLLAMA = Dialect(
    name="ollama",
    prefixes=("/api",),
    errors=ERRORS,
    bodies={
        "ollama_chat": parse_chat,
        "ollama_generate": parse_generate,
        "ollama_embed": parse_embed,
        "ollama_embeddings": parse_embeddings,
        "ollama_show": parse_show,
    },
    endpoints=(Generations, Embeds, ModelPages),
    apis={
        CHAT: "ollama_chat",
        GENERATE: "ollama_generate",
        EMBED: "ollama_embeddings",
        EMBEDDINGS: "ollama_embeddings",
        "/api": "ollama_pages",
    },
    answer_ids=(ID_PREFIX,),
    stream_type=CONTENT_TYPE,
    traced_as={GENERATE: "text_completion", EMBED: "embeddings", EMBEDDINGS: "embeddings"},
    greeting="Ollama is running",
)
