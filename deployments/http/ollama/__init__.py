"""Ollama's API: chat, generate, embed, and its pages about the model."""
