"""The cache key of a prompt: model, tenant, token ids, and the contents of its images."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from engine.protocol import EngineRequest

if TYPE_CHECKING:
    from engine.core.row import Row
    from engine.core.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Media:
    """One image in a prompt; its placeholders alone do not identify it."""

    start: int  # Index of its first placeholder token.
    end: int  # Index after its last placeholder token.
    content_hash: str  # See ImagePatches.


@dataclass(frozen=True, slots=True, eq=False)
class PromptKey:
    """The cache key of a prompt."""

    model: str  # Fingerprint of the model.
    tenant: str  # Only prompts of the same tenant share snapshots.
    token_ids: np.ndarray  # int32 [num_tokens].
    media: tuple[Media, ...] = ()  # Images in the order of the prompt.

    def __len__(self) -> int:
        return len(self.token_ids)

    def can_split_at(self, num_tokens: int) -> bool:
        """Return whether a boundary after `num_tokens` tokens splits no image."""
        return not any(media.start < num_tokens < media.end for media in self.media)

    def digests(self, lengths: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Yield (length, hex digest) of the prefixes of these lengths; lengths that would split an image are skipped.

        Args:
            lengths: Ascending numbers of tokens.
        """
        state = blake2b(digest_size=20)
        for name in (self.model, self.tenant):
            encoded = name.encode(errors="surrogatepass")
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        done, media = 0, list(self.media)
        for length in lengths:
            while media and media[0].end <= length:
                image = media.pop(0)
                state.update(self.token_ids[done : image.end].data)
                state.update(image.content_hash.encode())
                done = image.end
            if length > len(self) or (media and media[0].start < length):
                continue
            state.update(self.token_ids[done:length].data)
            done = length
            yield length, state.copy().hexdigest()

    def digest(self) -> str:
        """Return the hex digest of all tokens."""
        return next(digest for _, digest in self.digests([len(self)]))

    def prefix(self, num_tokens: int) -> "PromptKey":
        """Return the key of the first `num_tokens` tokens."""
        assert self.can_split_at(num_tokens)
        media = tuple(media for media in self.media if media.end <= num_tokens)
        return PromptKey(self.model, self.tenant, self.token_ids[:num_tokens], media)

    def num_common(self, other: "PromptKey") -> int:
        """Return the length of the common prefix, regardless of tenants; it ends before an image that differs."""
        length = min(len(self), len(other))
        differs = self.token_ids[:length] != other.token_ids[:length]
        common = int(differs.argmax()) if differs.any() else length
        for mine, theirs in zip(self.media, other.media, strict=False):
            if mine != theirs:
                return min(common, mine.start, theirs.start)
        return common

    def starts_with(self, other: "PromptKey") -> bool:
        """Return whether `other` is a prefix, regardless of tenants."""
        length = len(other)
        return (
            length <= len(self)
            and np.array_equal(self.token_ids[:length], other.token_ids)
            and self.media[: len(other.media)] == other.media
            and all(media.start >= length for media in self.media[len(other.media) :])
        )


def key_of(row: "Row", runner: "ModelRunner") -> PromptKey:
    """Return the key of a row's prompt, cached on the row until its prompt grows."""
    key = row.prompt_key
    if key is None or len(key) != row.num_tokens + row.num_skipped:
        key = row.prompt_key = key_of_tokens(row.spec, row.prompt_token_ids, runner)
    return key


def key_of_tokens(spec: EngineRequest, token_ids: np.ndarray, runner: "ModelRunner") -> PromptKey:
    """Return the key of tokens that begin with a request's prompt, with its tenant and images."""
    places = np.flatnonzero(token_ids == runner.image_token_id).tolist() if spec.images else []
    media, first = [], 0
    for image in spec.images:
        own = places[first : first + image.num_tokens]
        if own:  # else prompt and images do not match, which the prefill reports
            media.append(Media(own[0], own[-1] + 1, image.content_hash))
        first += image.num_tokens
    return PromptKey(runner.fingerprint, spec.tenant, np.ascontiguousarray(token_ids, np.int32), tuple(media))
