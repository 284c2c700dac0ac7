"""The table: every row of the hostile suite, by group."""

from tests.e2e.hostile import (
    fields,
    grammars,
    images,
    json_bodies,
    malformed_http,
    messages,
    ollama_routes,
    other_faces,
    pages,
    slow_clients,
    texts,
)
from tests.e2e.hostile.rows import Row

GROUPS: dict[str, tuple[Row, ...]] = {
    "malformed HTTP": malformed_http.ROWS,
    "malformed JSON": json_bodies.ROWS,
    "fields": fields.ROWS,
    "messages": messages.ROWS,
    "texts": texts.ROWS,
    "images": images.ROWS,
    "grammars": grammars.ROWS,
    "other faces": other_faces.ROWS,
    "Ollama": ollama_routes.ROWS,
    "ids and pages": pages.ROWS,
    "slow clients": slow_clients.ROWS,
}
TABLE = tuple(row for rows in GROUPS.values() for row in rows)
