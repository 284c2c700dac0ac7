"""Compares the tokenizers of two checkpoints; a draft model must have the target's tokenizer."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import EngineFailed
from engine.processing.checkpoint import num_embeddings, read_config

PROBES = (
    "The quick brown fox doesn't jump over 13 lazy dogs; it's 3.14159 times CamelCase, snake_case and UPPER.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, dès Noël où un zéphyr haï me vêt.",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "色は匂へど散りぬるを。我能吞下玻璃而不伤身体，はい、カタカナもです。키스의 고유조건은 입술끼리 만나야 한다.",
    "نص حكيم له سر قاطع עטלף אבק נס दिलीप हिन्दी है นอนน้อย ქართული",
    'def f(x: int) -> "str":\n\tif x >= 0x1F and not x % 2:\n        return f"{x!r}"  # {"key": [1, 2.5e-3, null]}\n',
    "0 1 12 123 1234 12345 1234567890 007 1,000,000.00 ½ ² ٣ 一二三",
    " one  two   three    four\t\ttabs\n\n\nlines\r\nreturns trailing  ",
    "😀👩‍👩‍👧‍👦🇩🇪👍🏽 é e\u0301 ﬁ Ａ \u00a0\u200b\u3000 <html>&amp;</html> \\n \\u0041",
)


def why_different(target_dir: Path, draft_dir: Path) -> str | None:
    """Return the first difference between the tokenizers of two checkpoints, None if the draft can read the tokens.

    Raises EngineFailed if a tokenizer cannot be loaded.
    """
    target, draft = load_tokenizer(target_dir), load_tokenizer(draft_dir)
    return next(_differences(target, draft, num_embeddings(read_config(draft_dir))), None)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load tokenizer.json with the tokens that tokenizer_config.json adds. Raises EngineFailed."""
    from transformers import PreTrainedTokenizerFast  # takes a second, so only processes that compare import it

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True).backend_tokenizer
    except Exception as error:  # tokenizers raises a bare Exception for a broken file
        raise EngineFailed(f"{model_dir}: the tokenizer cannot be loaded ({error})") from None


def _differences(target: Tokenizer, draft: Tokenizer, num_known: int) -> Iterator[str]:
    yield from _added_token_differences(target, draft)
    if (size := target.get_vocab_size()) != (drafts := draft.get_vocab_size()):
        yield f"the target's tokenizer has {size} tokens, the draft's {drafts}"
    if (largest := max(target.get_vocab().values())) >= num_known:
        yield f"the target's tokenizer goes up to token id {largest}, the draft's embedding up to {num_known - 1}"
    of_target, of_draft = target.get_vocab(), draft.get_vocab()
    if different := sorted(token for token in of_target if of_target[token] != of_draft.get(token)):
        token, other = different[0], of_draft.get(different[0], "no token")
        yield f"{token!r} is token {of_target[token]} in the target's tokenizer, {other} in the draft's"
    for probe in (*PROBES, "".join(sorted(_added_tokens(target)))):
        ids, drafts_ids = (tokenizer.encode(probe, add_special_tokens=True).ids for tokenizer in (target, draft))
        if ids != drafts_ids:
            yield _first_difference(probe, ids, drafts_ids)


def _added_token_differences(target: Tokenizer, draft: Tokenizer) -> Iterator[str]:
    targets, drafts = _added_tokens(target), _added_tokens(draft)
    for token in sorted(targets.keys() | drafts.keys()):
        if targets.get(token) != drafts.get(token):
            of_target, of_draft = (tokens.get(token, "no added token") for tokens in (targets, drafts))
            yield f"{token!r} is {of_target} in the target's tokenizer, {of_draft} in the draft's"


def _added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return string to id of all added tokens, special or not."""
    return {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}


def _first_difference(probe: str, target: list[int], draft: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(target, draft, strict=False)) if a != b), min(len(target), len(draft)))
    return (
        f"{probe[:40]!r}... is {len(target)} tokens in the target's tokenizer and {len(draft)} in the draft's; they "
        f"differ at token {at}: {target[at : at + 4]} and {draft[at : at + 4]}"
    )
