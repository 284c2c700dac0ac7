"""The OpenAI dialect: wire models, and encoders of its answers."""
