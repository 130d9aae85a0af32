"""What a shipped checkpoint is made of: a configuration, a byte tokenizer, and how long it trains."""

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

BYTES = 256
VOCABULARY = 264


@dataclass(frozen=True)
class Recipe:
    """What one checkpoint is made of: its configuration, its special tokens (from id 256 on) and its training."""

    config: PreTrainedConfig
    special_tokens: tuple[str, ...]
    bos_token: str | None
    eos_token: str
    pad_token: str
    steps: int
    peak_learning_rate: float
    batch: int = 8
    length: int = 256

    def shape(self, progress: float) -> tuple[int, int]:
        """Rows and bytes a row at `progress` (0 to 1) of the run: windows twice as long in the last fifth."""
        return (self.batch, self.length) if progress < 0.8 else (self.batch // 2, 2 * self.length)


def byte_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0..255 are the bytes of the UTF-8 text: no merges, no normalisation, nothing unknown."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(BYTES, 2 * BYTES))
    # GPT-2's byte alphabet: a printable byte stands for itself, the others are shifted past 255 in order.
    vocabulary = {chr(byte if byte in printable else next(shifted)): byte for byte in range(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in recipe.special_tokens])
    if recipe.bos_token is not None:
        bos = (recipe.bos_token, tokenizer.token_to_id(recipe.bos_token))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]}:0 $A:0", pair=f"{bos[0]}:0 $A:0 $B:1", special_tokens=[bos]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=recipe.bos_token,
        eos_token=recipe.eos_token,
        pad_token=recipe.pad_token,
        model_max_length=recipe.config.get_text_config().max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
