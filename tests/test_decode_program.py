"""Replayed decode steps: the same bits as through the model, or a refusal that names what cannot be repeated."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import porter
from porter.decode_program import DecodeProgram, checked_step, model_step, record_step
from porter.decoder import Decoder
from porter.generation import generate
from porter.kernels.cpu.library import RECORDED
from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.dispatch import op_calls
from porter.kernels.registry import OpRegistry, default_registry
from porter.kv_cache import contiguous_cache

pytestmark = pytest.mark.skipif(
    default_registry().providers["cpu"].library.load() is not None,  # type: ignore[attr-defined]
    reason="no compiler for the CPU kernels",
)

Checkpoint = Callable[..., Path]
PORTED = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}


def ported(checkpoint: Path, model_type: str, dtype: torch.dtype = torch.float32) -> Any:
    module = importlib.import_module(f"porter.models.{model_type}")
    return getattr(module, PORTED[model_type]).from_pretrained(checkpoint, dtype=dtype).eval()


def prompt(model: Any, batch: int = 1, length: int = 5) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(3))


def filled(model: Any, tokens: torch.Tensor, room: int = 48) -> Any:
    cache = contiguous_cache(model.config.num_hidden_layers, room)
    model_step(model, cache, tokens)
    return cache


@pytest.mark.parametrize("model_type", list(PORTED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_replayed_step_gives_the_bits_of_the_model(
    random_checkpoint: Checkpoint, model_type: str, dtype: torch.dtype, batch: int
) -> None:
    model = ported(random_checkpoint(model_type), model_type, dtype)
    with torch.inference_mode():
        tokens = prompt(model, batch)
        caches = [filled(model, tokens) for _ in range(2)]
        decode, ways = Decoder(model, caches[0], steps=40), []
        for step in range(40):
            token = (tokens[:, :1] + step) % model.config.vocab_size
            assert torch.equal(decode(token), model_step(model, caches[1], token)), (step, decode.way)
            ways.append(decode.way)
    assert ways == ["recorded", "checked", *["replayed"] * 38]


def test_layers_with_a_sliding_window_get_a_mask_and_refuse(random_checkpoint: Checkpoint) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 0}
    model = ported(random_checkpoint("qwen2", **changes), "qwen2")
    with torch.inference_mode():
        caches = [filled(model, prompt(model)) for _ in range(2)]
        decode = Decoder(model, caches[0], steps=30)
        for step in range(30):
            token = torch.tensor([[step]])
            assert torch.equal(decode(token), model_step(model, caches[1], token)), step
    assert (decode.way, decode.refusal) == ("model", "attention has a mask")


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_int8_models_replay(random_checkpoint: Checkpoint, tmp_path: Path, scheme: str) -> None:
    checkpoint = random_checkpoint("qwen3", dtype=torch.bfloat16)
    porter.adapt(str(checkpoint), target="cpu", scheme=scheme, output=tmp_path / "port")
    model = porter.load(tmp_path / "port")
    steps = list(generate(model, prompt(model), 20))
    plain = model.generate(prompt(model), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
    assert steps[-1].way == "replayed"
    assert [int(step.tokens[0]) for step in steps] == plain[0, 5:].tolist()


def test_a_long_cache_uses_more_threads_and_gives_the_same_bits(random_checkpoint: Checkpoint) -> None:
    model = ported(random_checkpoint("qwen2", head_dim=64), "qwen2")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            caches = [filled(model, prompt(model, length=60), room=400) for _ in range(2)]
            decode = Decoder(model, caches[0], steps=300)
            for step in range(300):
                token = torch.tensor([[step % 50]])
                assert torch.equal(decode(token), model_step(model, caches[1], token)), step
    finally:
        torch.set_num_threads(threads)


def recorded(model: Any) -> tuple[DecodeProgram | str, Any]:
    with torch.inference_mode():
        cache = filled(model, prompt(model))
        return record_step(model, cache, torch.tensor([[7]]))[0], cache


def test_a_wrong_program_is_found_before_it_is_used(random_checkpoint: Checkpoint) -> None:
    model = ported(random_checkpoint("qwen2"), "qwen2")
    program, _ = recorded(model)
    assert isinstance(program, DecodeProgram)
    last = program.program.argument(len(program.program.names) - 1, 3)
    with torch.inference_mode():
        program.program.memory[last] = model.model.embed_tokens.weight.data_ptr() + 256
        outcome, logits = checked_step(program, torch.tensor([[9]]))
        expected = filled(model, prompt(model))
        model_step(model, expected, torch.tensor([[7]]))
        assert outcome == "replaying gives other logits than the model"
        assert torch.equal(logits, model_step(model, expected, torch.tensor([[9]])))


def test_a_wrong_cache_entry_is_found(random_checkpoint: Checkpoint) -> None:
    model = ported(random_checkpoint("qwen2"), "qwen2")
    program, _ = recorded(model)
    assert isinstance(program, DecodeProgram)
    copies = [i for i, name in enumerate(program.program.names) if name == "copy"]
    source, other = (program.program.argument(i, 2) for i in copies[-2:])
    with torch.inference_mode():
        program.program.memory[source] = program.program.memory[other]
        outcome, _ = checked_step(program, torch.tensor([[9]]))
    assert str(outcome).startswith("replaying writes other keys and values than the model in layer")


def test_what_a_program_cannot_repeat_is_named_and_the_model_goes_on(random_checkpoint: Checkpoint) -> None:
    model = ported(random_checkpoint("qwen3"), "qwen3")
    expected = [int(step.tokens[0]) for step in generate(model, prompt(model), 12)]
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden_states: forward(hidden_states) * 1
    steps = list(generate(model, prompt(model), 12))
    assert (steps[-1].way, steps[-1].refusal) == ("model", "torch.mul.Tensor between kernels")
    assert [int(step.tokens[0]) for step in steps] == expected


def test_a_recording_that_fails_leaves_nothing_behind(random_checkpoint: Checkpoint) -> None:
    model = ported(random_checkpoint("qwen3"), "qwen3")
    expected = [int(step.tokens[0]) for step in generate(model, prompt(model), 12)]
    mlp, library = model.model.layers[1].mlp, default_registry().providers["cpu"].library  # type: ignore[attr-defined]
    functions = {name: getattr(library, name) for name in RECORDED}
    forward = mlp.forward

    def interrupted(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape[1] == 1:
            raise KeyboardInterrupt
        return forward(hidden_states)  # type: ignore[no-any-return]

    mlp.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(generate(model, prompt(model), 12))
    mlp.forward = forward
    assert {name: getattr(library, name) for name in RECORDED} == functions
    assert not any(module._forward_hooks for module in model.modules())
    steps = list(generate(model, prompt(model), 12))
    assert [int(step.tokens[0]) for step in steps] == expected and steps[-1].way == "replayed"


def test_generations_of_two_models_take_turns(random_checkpoint: Checkpoint) -> None:
    """Step by step in turns, and in two threads: each gives what it gives alone, and the caller's mode stays."""
    models = [ported(random_checkpoint(kind), kind) for kind in ("qwen2", "qwen3")]
    alone = [[int(s.tokens[0]) for s in generate(model, prompt(model), 20)] for model in models]
    turns: list[list[int]] = [[], []]
    for pair in zip(*(generate(model, prompt(model), 20) for model in models), strict=True):
        assert not torch.is_inference_mode_enabled()
        for tokens, step in zip(turns, pair, strict=True):
            tokens.append(int(step.tokens[0]))
    assert turns == alone and not torch.is_inference_mode_enabled()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            both = pool.map(lambda model: [int(s.tokens[0]) for s in generate(model, prompt(model), 20)], models)
            assert list(both) == alone


def test_weights_that_are_replaced_stay_until_the_program_ends(random_checkpoint: Checkpoint) -> None:
    model = ported(random_checkpoint("qwen2"), "qwen2")
    program, _ = recorded(model)
    assert isinstance(program, DecodeProgram)
    kept = {tensor.data_ptr() for tensor in program.program.kept}
    assert all(parameter.data_ptr() in kept for parameter in model.parameters())


def test_a_copy_of_the_kernels_and_kernels_that_are_not_used_refuse(random_checkpoint: Checkpoint) -> None:
    model = ported(random_checkpoint("qwen2"), "qwen2")
    filled(model, prompt(model))
    unused, foreign = CpuProvider(), SimpleNamespace(name="cpu", library=SimpleNamespace(loaded=True))
    for provider, reason in ((unused, "not in use"), (foreign, "its own copy")):
        for _, call in op_calls(model):
            call.registry = OpRegistry({}, {"cpu": cast(Any, provider)})
        assert reason in str(recorded(model)[0])
    assert not unused.library.loaded


def test_hooks_and_other_caches_refuse(random_checkpoint: Checkpoint) -> None:
    model = ported(random_checkpoint("qwen2"), "qwen2")
    handle = model.model.norm.register_forward_hook(lambda *call: None)
    assert recorded(model)[0] == "modules have hooks, which a program would not run"
    handle.remove()
    with torch.inference_mode():
        cache = model(prompt(model), use_cache=True).past_key_values
        assert record_step(model, cache, torch.tensor([[7]]))[0] == "the key-value cache is not contiguous"


def test_a_model_without_ops_refuses() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    assert recorded(model)[0] == "the model calls no Ops"


def test_a_full_cache_says_so(random_checkpoint: Checkpoint) -> None:
    model = ported(random_checkpoint("qwen2"), "qwen2")
    with torch.inference_mode():
        cache = filled(model, prompt(model), room=6)
        program, _ = record_step(model, cache, torch.tensor([[7]]))
        assert isinstance(program, DecodeProgram)
        with pytest.raises(IndexError, match="holds 6 tokens and is full"):
            program.step(torch.tensor([[7]]))
