"""The model card that is written beside each shipped checkpoint."""

from transformers import PreTrainedModel

from porter.models.shipped.recipes import VOCABULARY, Recipe

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
