"""Speculative decoding gives the tokens of plain decoding whatever is drafted, and its cache is that of plain steps."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import porter
from porter import speculation
from porter.errors import PorterError
from porter.generation import generate
from porter.kv_cache import StateLayer, cache_for
from porter.models.family import families
from porter.models.reduce import randomise, reduced_config
from porter.models.shipped.train import read_text
from porter.prediction_layer import load_prediction_layer
from porter.speculation import SpeculativeStep, generate_speculatively

HELD_OUT = (
    "The first half-hour",
    "Captain Wentworth was ",
    "Anne could not immediately fall into a quotation again. The sweet scenes of autumn were for a while put by",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("mtp") / "port"
    porter.adapt("tiny-deepseek-v3-mtp", scheme="fp32", output=directory)
    return directory


@pytest.fixture(scope="module")
def pair(exported: Path) -> tuple[Any, Any]:
    model = porter.load(exported)
    return model, load_prediction_layer(exported, model)


@pytest.fixture(scope="module")
def grouped_query(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("gqa") / "port"
    porter.adapt("tiny-qwen3", scheme="fp32", output=directory)
    return porter.load(directory)


def ids(*texts: str, bos: bool = True) -> torch.Tensor:
    return torch.tensor([[*([256] if bos else []), *text.encode()] for text in texts])


def plain(model: Any, prompt: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    return torch.stack([step.tokens for step in generate(model, prompt, count, **options)], dim=1)


def joined(steps: list[SpeculativeStep]) -> torch.Tensor:
    return torch.cat([step.tokens for step in steps], dim=1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model with recurrent states, and its trained prediction layer."""
    directory: Path = tmp_path_factory.mktemp("hybrid") / "port"
    porter.adapt("tiny-qwen3-next", scheme="fp32", output=directory)
    model = porter.load(directory)
    return model, load_prediction_layer(directory, model)


@pytest.mark.parametrize("text", HELD_OUT)
@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_tokens_are_those_of_plain_greedy(pair: tuple[Any, Any], text: str, drafts: int) -> None:
    model, layer = pair
    steps = list(generate_speculatively(model, layer, ids(text), 96, drafts=drafts))
    assert torch.equal(joined(steps), plain(model, ids(text), 96))
    assert (steps[0].drafted, steps[0].accepted) == (0, 0)
    assert all(1 <= step.tokens.shape[1] == step.accepted + 1 <= drafts + 1 for step in steps)
    # The layer is trained: drafts save steps.
    accepted, drafted = (sum(getattr(step, name) for step in steps) for name in ("accepted", "drafted"))
    assert len(steps) == 96 - accepted and accepted > 0.3 * drafted / drafts


@pytest.mark.parametrize("start", range(0, 20_000, 1_700))
@pytest.mark.parametrize("drafts", [1, 3])
def test_tokens_of_a_model_with_states_are_those_of_plain_greedy(
    hybrid: tuple[Any, Any], start: int, drafts: int
) -> None:
    model, layer = hybrid
    _, held_out = read_text()
    prompt = held_out[None, start : start + 5 + start % 57]
    steps = list(generate_speculatively(model, layer, prompt, 64, drafts=drafts))
    assert torch.equal(joined(steps), plain(model, prompt, 64))
    accepted, drafted = (sum(getattr(step, name) for step in steps) for name in ("accepted", "drafted"))
    assert len(steps) == 64 - accepted and accepted > 0.3 * drafted / drafts


def test_a_batch_of_a_model_with_states(hybrid: tuple[Any, Any]) -> None:
    model, layer = hybrid
    prompts = ids("Sir Walter Elliot, of K", "Captain Wentworth was a", bos=False)
    steps = list(generate_speculatively(model, layer, prompts, 48, drafts=2))
    assert torch.equal(joined(steps), plain(model, prompts, 48))


RANDOM = {
    "qwen3_next": {},
    "qwen3_5_text": {"mtp_num_hidden_layers": 1},
    "qwen3_5_moe_text": {"mtp_num_hidden_layers": 1},
    "deepseek_v32": {"num_nextn_predict_layers": 1},
}


@pytest.mark.parametrize("model_type", RANDOM)
def test_a_layer_of_random_weights_changes_nothing(model_type: str, tmp_path: Path) -> None:
    """Next to no draft is accepted: for models with states, nearly every step goes back."""
    config = reduced_config(CONFIG_MAPPING[model_type]())
    config.max_position_embeddings = 128
    for name, value in RANDOM[model_type].items():
        setattr(config, name, value)
    family = families()[model_type]
    upstream = randomise(AutoModelForCausalLM.from_config(config))
    upstream.save_pretrained(tmp_path / "source")
    layer = family.predicting(config, family.port(config), ["mtp.fc.weight"] if "qwen" in model_type else [])
    assert layer is not None
    stored = load_file(tmp_path / "source" / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for name, shape in layer.expected.items():
        stored[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    for name, of in layer.copies.items():
        stored[name] = stored[of].clone()
    save_file(stored, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    porter.adapt(tmp_path / "source", scheme="fp32", output=tmp_path / "port")
    model = porter.load(tmp_path / "port")
    layer_of_port = load_prediction_layer(tmp_path / "port", model)
    prompt = torch.randint(0, config.vocab_size, (1, 11), generator=generator)
    for drafts in (1, 3):
        steps = list(generate_speculatively(model, layer_of_port, prompt, 48, drafts=drafts))
        assert torch.equal(joined(steps), plain(model, prompt, 48))
        assert sum(step.accepted for step in steps) < 0.3 * sum(step.drafted for step in steps)


def test_a_batch_keeps_what_every_sequence_accepts(pair: tuple[Any, Any]) -> None:
    model, layer = pair
    prompts = ids("Sir Walter Elliot, of K", "Captain Wentworth was a")
    steps = list(generate_speculatively(model, layer, prompts, 48, drafts=2))
    assert torch.equal(joined(steps), plain(model, prompts, 48))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("prompt", [torch.tensor([[256]]), ids("The ")])
def test_few_tokens_and_short_prompts(pair: tuple[Any, Any], prompt: torch.Tensor, count: int) -> None:
    model, layer = pair
    steps = list(generate_speculatively(model, layer, prompt, count, drafts=4))
    assert torch.equal(joined(steps), plain(model, prompt, count))


def test_the_last_position_is_reached_and_not_passed(pair: tuple[Any, Any]) -> None:
    model, layer = pair
    limit = int(model.config.max_position_embeddings)
    prompt = torch.randint(0, 256, (1, limit - 6), generator=torch.Generator().manual_seed(5))
    steps = list(generate_speculatively(model, layer, prompt, 6, drafts=4))
    assert torch.equal(joined(steps), plain(model, prompt, 6))
    with pytest.raises(PorterError, match=f"exceed the model's {limit} positions"):
        next(generate_speculatively(model, layer, prompt, 7, drafts=4))


def test_a_stop_token_ends_the_text_where_plain_decoding_ends(pair: tuple[Any, Any]) -> None:
    model, layer = pair
    prompt = ids(HELD_OUT[0])
    for token in set(plain(model, prompt, 40)[0].tolist()):
        stop = frozenset([token])
        steps = list(generate_speculatively(model, layer, prompt, 40, drafts=3, stop=stop))
        assert torch.equal(joined(steps), plain(model, prompt, 40, stop=stop))


class Scripted:
    """Stands in for the drafter: right for the first `pattern[i]` drafts of call i, then wrong."""

    pattern = (0, 3, 1, 2, 0, 0, 3, 2)
    truth: torch.Tensor
    made: list[Any]

    def __init__(self, model: Any, layer: Any, cache: Any) -> None:
        self.number, self.cache, self.call = int(model.config.num_hidden_layers), cache, 0
        self.known = 1
        self.made.append(self)

    def __call__(self, following: torch.Tensor, hidden_states: torch.Tensor, drafts: int) -> torch.Tensor:
        # Every token but the first follows one, and is told once.
        start = self.known
        self.known += following.shape[1]
        assert torch.equal(following, self.truth[:, start : self.known])
        assert hidden_states.shape[1] == following.shape[1]
        start = self.known
        drafted = self.truth[:, start : start + drafts].clone()
        drafted[:, self.pattern[self.call % len(self.pattern)] :] ^= 1
        self.call += 1
        return drafted


@pytest.mark.parametrize("kind", ["latent", "grouped_query"])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_cache_forgets_exactly_what_was_refused(
    pair: tuple[Any, Any], grouped_query: Any, monkeypatch: pytest.MonkeyPatch, kind: str, batch: int
) -> None:
    model = pair[0] if kind == "latent" else grouped_query
    prompt = ids(*("Lady Russell, and then", "the Miss Musgroves, as")[:batch], bos=kind == "latent")
    count = 41
    expected = plain(model, prompt, count)
    Scripted.truth, Scripted.made = torch.cat((prompt, expected), dim=1), []
    monkeypatch.setattr(speculation, "Drafter", Scripted)
    steps = list(generate_speculatively(model, pair[1], prompt, count, drafts=3))
    assert torch.equal(joined(steps), expected)
    assert [step.accepted for step in steps[1:7]] == list(Scripted.pattern[:6])
    # What the cache holds is what one pass over the text puts there.
    speculative = Scripted.made[0].cache
    known = int(speculative.get_seq_length())
    once = cache_for(model.config, known)
    with torch.inference_mode():
        model(Scripted.truth[:, :known], cache=once, use_cache=True)
    for ours, theirs in zip(speculative.layers, once.layers, strict=False):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(a[:, :, :known], b[:, :, :known], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("pattern", [(0,), (3,), (1,), (0, 3, 1, 2, 0, 0, 3, 2)])
def test_states_go_back_exactly_as_far_as_was_refused(
    hybrid: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, pattern: tuple[int, ...], batch: int
) -> None:
    model, layer = hybrid
    prompt = ids(*("Lady Russell, and then", "the Miss Musgroves, as")[:batch], bos=False)
    count = 41
    expected = plain(model, prompt, count)
    Scripted.truth, Scripted.made = torch.cat((prompt, expected), dim=1), []
    monkeypatch.setattr(Scripted, "pattern", pattern)
    monkeypatch.setattr(speculation, "Drafter", Scripted)
    steps = list(generate_speculatively(model, layer, prompt, count, drafts=3))
    assert torch.equal(joined(steps), expected)
    assert len(steps) == count - sum(step.accepted for step in steps) <= count
    drafted = [step.accepted for step in steps if step.drafted == 3]
    assert drafted == [pattern[i % len(pattern)] for i in range(len(drafted))] and len(drafted) >= 8
    # The states and keys are those of one pass over as many tokens.
    speculative = Scripted.made[0].cache
    known = int(speculative.get_seq_length())
    once = cache_for(model.config, known)
    with torch.inference_mode():
        model(Scripted.truth[:, :known], cache=once, use_cache=True)
    for ours, theirs in zip(speculative.layers, once.layers, strict=False):
        if isinstance(theirs, StateLayer):
            assert isinstance(ours, StateLayer)
            pairs = (ours.conv_states[0], theirs.conv_states[0]), (ours.recurrent_states[0], theirs.recurrent_states[0])
        else:
            keys = (ours.keys, theirs.keys), (ours.values, theirs.values)
            pairs = tuple((a[:, :, :known], b[:, :, :known]) for a, b in keys)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_the_layers_cache_is_that_of_one_pass(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps of several drafts, some of them refused, the layer's keys belong to the model's states alone."""
    model, layer = pair
    made: list[Any] = []
    drafter = speculation.Drafter

    def kept(*arguments: Any) -> Any:
        made.append(drafter(*arguments))
        return made[0]

    monkeypatch.setattr(speculation, "Drafter", kept)
    prompt = ids(HELD_OUT[1])
    steps = list(generate_speculatively(model, layer, prompt, 40, drafts=3))
    assert 0 < sum(s.accepted for s in steps) < sum(s.drafted for s in steps)
    states = made[0].cache.layers[made[0].number]
    tokens = torch.cat((prompt, joined(steps)), dim=1)[:, : states.length + 1]
    with torch.inference_mode():
        hidden = model.base_model(tokens[:, :-1], use_cache=False).last_hidden_state
        fresh = drafter(model, layer, speculation.speculative_cache(model.config, 100))
        fresh(tokens[:, 1:], hidden, 1)
    once = fresh.cache.layers[fresh.number]
    assert once.length == states.length
    for a, b in ((states.keys, once.keys), (states.values, once.values)):
        torch.testing.assert_close(a[:, :, : once.length], b[:, :, : once.length], rtol=1e-3, atol=1e-4)


def test_bad_requests_are_named(pair: tuple[Any, Any], grouped_query: Any) -> None:
    model, layer = pair
    with pytest.raises(PorterError, match="0 drafted tokens a step; give at least 1"):
        next(generate_speculatively(model, layer, ids("a"), 4, drafts=0))
    with pytest.raises(PorterError, match="the prompt has no tokens"):
        next(generate_speculatively(model, layer, torch.zeros(1, 0, dtype=torch.int64), 4))
    with pytest.raises(PorterError, match="holds no prediction layer"):
        load_prediction_layer("port", grouped_query)


def test_models_whose_cache_cannot_go_back_are_refused() -> None:
    importlib.import_module(families()["deepseek_v4"].module)  # where the kinds of its cache's layers come from
    with pytest.raises(PorterError, match="layer 0 keeps its past in a DeepseekV4"):
        speculation.speculative_cache(reduced_config(CONFIG_MAPPING["deepseek_v4"]()), 16)


def test_run_prints_the_share_accepted(exported: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import json

    from porter.cli.app import run

    results = []
    for options in ([], ["--speculative"], ["--speculative", "--draft-tokens", "3"]):
        assert run(["run", str(exported), HELD_OUT[1], "--new-tokens", "24", "--json", *options]) == 0
        results.append(json.loads(capfd.readouterr().out))
    assert results[0]["tokens"] == results[1]["tokens"] == results[2]["tokens"]
    assert results[0]["speculation"] is None
    told = results[1]["speculation"]
    assert told["accepted"] == 24 - told["steps"] and told["acceptance_rate"] == told["accepted"] / told["drafted"]
    assert run(["run", str(exported), HELD_OUT[1], "--new-tokens", "24", "--speculative"]) == 0
    assert f"{told['accepted']} of {told['drafted']} drafted tokens accepted" in capfd.readouterr().err
