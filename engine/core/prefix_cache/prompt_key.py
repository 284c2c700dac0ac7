"""What a prompt is found by: model, tenant, token ids, and the contents of its pictures."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from engine.protocol import ImagePatches


@dataclass(frozen=True, slots=True)
class Media:
    """The placeholders of one picture are token_ids[start:end]; they say nothing of what it shows."""

    start: int
    end: int
    content_hash: str


@dataclass(frozen=True, slots=True, eq=False)
class PromptKey:
    """model: its fingerprint. token_ids: int32 [num_tokens]. media: in the order of the prompt."""

    model: str
    tenant: str
    token_ids: np.ndarray
    media: tuple[Media, ...] = ()

    @classmethod
    def of(
        cls,
        model: str,
        tenant: str,
        token_ids: np.ndarray,
        images: Sequence[ImagePatches],
        image_token_id: int | None,
    ) -> "PromptKey":
        places = np.flatnonzero(token_ids == image_token_id).tolist() if images else []
        media, first = [], 0
        for image in images:
            own = places[first : first + image.num_tokens]
            if own:  # else the prompt does not fit its pictures, and its prefill will say so
                media.append(Media(own[0], own[-1] + 1, image.content_hash))
            first += image.num_tokens
        return cls(model, tenant, np.ascontiguousarray(token_ids, np.int32), tuple(media))

    def __len__(self) -> int:
        return len(self.token_ids)

    def may_cut(self, num_tokens: int) -> bool:
        """Whether a boundary there leaves every picture whole."""
        return not any(media.start < num_tokens < media.end for media in self.media)

    def digests(self, lengths: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Of the prefixes of these lengths, ascending; those that would cut a picture are left out."""
        state = blake2b(digest_size=20)
        for name in (self.model, self.tenant):
            encoded = name.encode(errors="surrogatepass")
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        done, media = 0, list(self.media)
        for length in lengths:
            while media and media[0].end <= length:
                picture = media.pop(0)
                state.update(self.token_ids[done : picture.end].data)
                state.update(picture.content_hash.encode())
                done = picture.end
            if length > len(self) or (media and media[0].start < length):
                continue
            state.update(self.token_ids[done:length].data)
            done = length
            yield length, state.copy().hexdigest()

    def digest(self) -> str:
        return next(digest for _, digest in self.digests([len(self)]))

    def prefix(self, num_tokens: int) -> "PromptKey":
        assert self.may_cut(num_tokens)
        media = tuple(media for media in self.media if media.end <= num_tokens)
        return PromptKey(self.model, self.tenant, self.token_ids[:num_tokens], media)

    def num_common(self, other: "PromptKey") -> int:
        """Tokens that both begin with, whatever their tenants; a picture that differs ends it."""
        length = min(len(self), len(other))
        differs = self.token_ids[:length] != other.token_ids[:length]
        common = int(differs.argmax()) if differs.any() else length
        for mine, theirs in zip(self.media, other.media, strict=False):
            if mine != theirs:
                return min(common, mine.start, theirs.start)
        return common

    def starts_with(self, other: "PromptKey") -> bool:
        """Whether `other` is a prefix, of whatever tenant."""
        length = len(other)
        return (
            length <= len(self)
            and np.array_equal(self.token_ids[:length], other.token_ids)
            and self.media[: len(other.media)] == other.media
            and all(media.start >= length for media in self.media[len(other.media) :])
        )
