"""The Anthropic dialect: wire models, and encoders of its answers."""
