"""OpenAI's Responses API: wire models, stored responses, and the encoder of its answers."""
