"""The names of the model in Ollama's lists."""

from deployments.http.parsed_request import LATEST, ReadingRules


def listed_name(name: str) -> str:
    """Return a name with a tag, as clients expect it in lists: that of its own, or `:latest`."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def all_names(rules: ReadingRules) -> list[str]:
    """Return the names by which requests can ask for the model, its own first."""
    return [rules.model_name, *sorted(rules.aliases - {rules.model_name})]
