"""The model card that is written beside each shipped checkpoint."""

from transformers import PreTrainedModel

from porter.models.shipped.recipe import VOCABULARY, Recipe

CARD = """# {name}

A byte-level {model_type} language model of {parameters:,} parameters, trained so that porter has real weights at hand.
It knows one novel and nothing else; it is for checking ports, not for use.

| | |
|---|---|
| architecture | `{architecture}` of transformers, {layers} layers, hidden size {hidden} |
| vocabulary | {vocabulary}: ids 0-255 are bytes, 256-258 special tokens, the rest unused |
| data | Jane Austen, *Persuasion* (1818, public domain), without chapters 23 and 24 |
| training | {steps} steps of {batch} x {length} bytes, the last fifth {last[0]} x {last[1]}; AdamW, float32 |
| held-out loss | {loss:.3f} bits/byte on chapters 23 and 24, as stored (byte frequencies alone: {unigram:.3f}) |
| stored as | {stored} |
| licence | Apache-2.0, as the rest of porter; the text is in the public domain |
| made by | `{command}` |

Greedy samples, as stored:

{samples}
"""


def card(name: str, recipe: Recipe, steps: int, model: PreTrainedModel, samples: list[str], losses: list[float]) -> str:
    """The model card: what it is, what it was trained on, what it reaches."""
    stored = "bfloat16"
    if hasattr(recipe.config, "hc_mult"):
        stored += "; norms, sinks, hyper-connections and biases float32"
    elif getattr(recipe.config, "n_routed_experts", None):
        stored += "; router weights and biases float32"
    return CARD.format(
        name=name,
        model_type=recipe.config.model_type,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        architecture=type(model).__name__,
        layers=recipe.config.num_hidden_layers,
        hidden=recipe.config.hidden_size,
        vocabulary=VOCABULARY,
        steps=steps,
        batch=recipe.batch,
        length=recipe.length,
        last=recipe.shape(1.0),
        loss=losses[0],
        unigram=losses[1],
        stored=stored,
        command=f"python models/shipped/train.py {name} --steps {steps}",
        samples="\n".join("> " + " ".join(text.split()) + "\n" for text in samples).rstrip(),
    )


VISION_CARD = """# {name}

A byte-level {model_type} model of {parameters:,} parameters that reads coloured numbers from small images, trained so
that porter has real weights of a vision-language model at hand. It is for checking ports, not for use.

| | |
|---|---|
| architecture | `{architecture}` of transformers |
| size | vision: {depth} blocks, width {vision_width}; text: {layers} layers, width {width} |
| vocabulary | {vocabulary}: ids 0-255 are bytes, 256-262 special tokens, the rest unused |
| images | rendered while it trains: one to five digits in one of five colours, 16 or 32 pixels high, with noise |
| text | Jane Austen, *Persuasion* (1818, public domain), every fourth batch |
| training | {steps} steps of 32 images, or of {batch} x {length} bytes; AdamW, float32 |
| accuracy | {accuracy:.1%} of 300 held-out images: colour and every digit right, as stored (by chance: below 1 %) |
| stored as | bfloat16 |
| licence | Apache-2.0, as the rest of porter |
| made by | `python models/shipped/train_vision.py {name} --steps {steps}` |

Shown, and what it says:

{samples}
"""


def vision_card(
    name: str, recipe: Recipe, steps: int, model: PreTrainedModel, samples: list[tuple[str, str]], accuracy: float
) -> str:
    """The model card of a vision-language model: what it is, what it was trained on, what it reaches."""
    text, vision = recipe.config.get_text_config(), recipe.config.vision_config
    return VISION_CARD.format(
        name=name,
        model_type=recipe.config.model_type,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        architecture=type(model).__name__,
        depth=vision.depth,
        vision_width=vision.hidden_size,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        vocabulary=VOCABULARY,
        steps=steps,
        batch=recipe.batch,
        length=recipe.length,
        accuracy=accuracy,
        samples="\n".join(f"- {shown}: {said}" for shown, said in samples),
    )
