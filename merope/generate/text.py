"""Which text guides a clip: as the caller gave it, checked before any model runs, and as the transformer reads it."""

from dataclasses import dataclass

from torch import Tensor

from merope.errors import invalid


@dataclass(frozen=True)
class Embeddings:
    """Of the prompt, and of the negative prompt where guidance needs it."""

    positive: Tensor  # [B, L, text_dim]
    negative: Tensor | None = None  # [B, L, text_dim]

    def repeated(self, views: int) -> "Embeddings":
        """Those of every clip for each of its views."""
        both = [None if x is None else x.repeat_interleave(views, dim=0) for x in (self.positive, self.negative)]
        assert both[0] is not None
        return Embeddings(both[0], both[1])


@dataclass(frozen=True)
class Text:
    """What the caller said, in words or as embeddings [B, L, text_dim]."""

    prompt: str | list[str] | None
    negative_prompt: str | list[str] | None
    prompt_embeds: Tensor | None
    negative_prompt_embeds: Tensor | None

    @property
    def count(self) -> int:
        """Number of prompts."""
        if self.prompt_embeds is not None:
            return self.prompt_embeds.shape[0]
        return len(self.prompt) if isinstance(self.prompt, list) else 1

    @property
    def prompts(self) -> list[str] | None:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    @property
    def negative_prompts(self) -> list[str] | None:
        """One per prompt, "" where nothing was said; None where embeddings were given."""
        if self.negative_prompt_embeds is not None:
            return None
        words = self.negative_prompt or ""
        words = [words] if isinstance(words, str) else words
        return words * self.count if len(words) == 1 else words

    def check(self, has_encoder: bool, is_guided: bool, text_dim: int) -> None:
        """Refuse text that is doubled, missing, or that the model has no encoder for."""
        for name, words, embeddings in (
            ("prompt", self.prompt, self.prompt_embeds),
            ("negative_prompt", self.negative_prompt, self.negative_prompt_embeds),
        ):
            _check_one(name, words, embeddings, has_encoder, text_dim)
        if self.prompt is None and self.prompt_embeds is None and has_encoder:
            raise invalid("prompt", "a text or prompt_embeds", "neither", 'pass prompt="" for no text')
        if is_guided and self.negative_prompt_embeds is None and not has_encoder:
            fix = "pass guidance_scale=1, or negative_prompt_embeds"
            raise invalid("guidance_scale", "at most 1 for a model without a text encoder", "more", fix)
        negatives = self.negative_prompt_embeds if self.negative_prompt_embeds is not None else self.negative_prompt
        if is_guided and isinstance(negatives, list | Tensor) and len(negatives) not in (1, self.count):
            fix = "pass one, or one per prompt"
            raise invalid("negative prompts", f"1 or {self.count}", len(negatives), fix)


def _check_one(
    name: str, words: str | list[str] | None, embeddings: Tensor | None, has_encoder: bool, text_dim: int
) -> None:
    if words is not None and embeddings is not None:
        raise invalid(name, f"given once, as {name} or as {name}_embeds", "both", "leave one out")
    if words is not None and not has_encoder:
        fix = f"pass {name}_embeds, or load a model with text_encoder and tokenizer"
        raise invalid(name, "None for a model without a text encoder", repr(words)[:60], fix)
    is_list = isinstance(words, list) and len(words) > 0 and all(isinstance(word, str) for word in words)
    if words is not None and not isinstance(words, str) and not is_list:
        raise invalid(name, "a string or a list of strings", repr(words)[:60], "pass the text itself")
    if embeddings is not None and (embeddings.ndim != 3 or embeddings.shape[-1] != text_dim):
        fix = "use the text encoder of this model"
        raise invalid(f"{name}_embeds", f"[B, L, {text_dim}]", list(embeddings.shape), fix)
