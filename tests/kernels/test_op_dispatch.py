"""Which provider serves a call, and what is counted."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from porter.kernels.contract import Evidence, Implementation, StrictFallback, UnknownOp
from porter.kernels.dispatch import GRADIENTS, OpCall, bind_model, op_calls, usage, using_reference
from porter.kernels.reference.norm import OPS as NORM
from porter.kernels.reference.norm import rms_norm_standard
from porter.kernels.registry import OpRegistry, default_registry

ONLY_FLOAT32 = "only float32"


@dataclass
class Float32Norm:
    """A provider of one kernel, rms_norm/standard in float32, on one chip."""

    name: str = "narrow"
    chip: str = "cpu"
    served: list[torch.Size] = field(default_factory=list)

    def supported(self, chip_name: str) -> str | None:
        return None if chip_name == self.chip else f"runs on {self.chip} alone"

    def implementation(self, name: str, variant: str, chip_name: str = "cpu") -> Implementation | None:
        if (name, variant) != ("rms_norm", "standard"):
            return None
        return Implementation(self.call, self.accepts, Evidence("measured"))

    def accepts(self, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> str | None:
        return None if hidden_states.dtype == torch.float32 else ONLY_FLOAT32

    def call(self, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.served.append(hidden_states.shape)
        return rms_norm_standard(hidden_states, weight, eps)


@pytest.fixture
def provider() -> Float32Norm:
    return Float32Norm()


@pytest.fixture
def registry(provider: Float32Norm) -> OpRegistry:
    return OpRegistry.of(NORM, [provider, Float32Norm("second")])


@pytest.fixture
def call(registry: OpRegistry) -> OpCall:
    call = OpCall("rms_norm", "standard", registry)
    call.bind("cpu", ["narrow"], site="model.norm.rms_norm")
    return call


def arguments(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, float]:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).to(dtype), torch.ones(7, dtype=dtype), 1e-6


class Norms(nn.Module):
    def __init__(self, registry: OpRegistry | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))
        self.rms_norm = OpCall("rms_norm", "standard", registry)
        self.inner = nn.Module()
        self.inner.add_rms_norm = OpCall("add_rms_norm", "standard", registry)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed, total = self.inner.add_rms_norm(x, x, self.weight, 1e-6)  # type: ignore[operator]
        return self.rms_norm(normed + total, self.weight, 1e-6)  # type: ignore[no-any-return]


def test_the_first_provider_that_accepts_serves(call: OpCall, provider: Float32Norm) -> None:
    assert torch.equal(call(*arguments()), rms_norm_standard(*arguments()))
    assert provider.served == [torch.Size([3, 7])]
    assert call.calls == {"narrow": 1} and call.fallbacks == {}


def test_a_refusal_goes_to_the_next_provider_and_is_counted(registry: OpRegistry) -> None:
    call = OpCall("rms_norm", "standard", registry)
    call.bind("cpu", ["narrow", "second"])
    call(*arguments(torch.bfloat16))
    call(*arguments(torch.bfloat16))
    assert call.calls == {"reference": 2}
    assert call.fallbacks == {("narrow", ONLY_FLOAT32): 2, ("second", ONLY_FLOAT32): 2}


def test_a_strict_refusal_names_op_site_provider_and_reason(registry: OpRegistry) -> None:
    call = OpCall("rms_norm", "standard", registry)
    call.bind("cpu", ["narrow"], strict=True, site="model.norm.rms_norm")
    call(*arguments())
    with pytest.raises(StrictFallback) as raised:
        call(*arguments(torch.float64))
    assert str(raised.value) == (
        f"rms_norm/standard at model.norm.rms_norm: provider narrow on cpu refuses: {ONLY_FLOAT32}"
    )


@pytest.mark.parametrize(
    ("op", "chip", "order", "reason"),
    [
        ("rms_norm", "ascend-910b", "narrow", "runs on cpu alone"),
        ("add_rms_norm", "cpu", "narrow", "has no kernel for add_rms_norm/standard"),
        ("rms_norm", "cpu", "absent", "no such provider is installed"),
    ],
)
def test_a_chip_without_a_kernel_falls_back_visibly(
    registry: OpRegistry, op: str, chip: str, order: str, reason: str
) -> None:
    call = OpCall(op, "standard", registry)
    call.bind(chip, [order])
    assert call.fallbacks == {(order, reason): 1}
    assert call.preferred() == "reference"
    with pytest.raises(StrictFallback, match=reason):
        call.bind(chip, [order], strict=True)


def test_the_reference_by_choice_is_no_fallback(registry: OpRegistry) -> None:
    call = OpCall("rms_norm", "standard", registry)
    for providers in ([], ["reference"]):
        call.bind("cpu", providers, strict=True)
        call(*arguments())
        assert call.calls == {"reference": 1} and call.fallbacks == {}


def test_gradients_need_the_reference(call: OpCall, provider: Float32Norm) -> None:
    hidden_states, weight, eps = arguments()
    weight.requires_grad_()
    call(hidden_states, weight, eps).sum().backward()
    assert weight.grad is not None and bool(weight.grad.any())
    assert call.fallbacks == {("narrow", GRADIENTS): 1} and not provider.served
    with torch.no_grad():
        call(hidden_states, weight, eps)
    with torch.inference_mode():
        call(hidden_states, weight, eps)
    assert call.calls == {"reference": 1, "narrow": 2}


def test_an_unknown_op_says_what_there_is() -> None:
    known = "gated, standard, unweighted, zero_centered"
    with pytest.raises(UnknownOp, match=f"no Op rms_norm/layer; rms_norm has {known}"):
        OpCall("rms_norm", "layer")
    with pytest.raises(UnknownOp, match=r"no Op layer_norm/standard; Ops: .*rms_norm"):
        OpCall("layer_norm", "standard")


def test_two_ops_or_providers_of_one_name_are_refused(provider: Float32Norm) -> None:
    with pytest.raises(ValueError, match="two Ops are named rms_norm/standard"):
        OpRegistry.of([*NORM, *NORM])
    with pytest.raises(ValueError, match="two providers are named narrow"):
        OpRegistry.of(NORM, [provider, provider])


def test_an_unbound_call_works() -> None:
    call = OpCall("rms_norm", "standard")
    torch.testing.assert_close(call(*arguments()), rms_norm_standard(*arguments()))
    assert sum(call.calls.values()) == 1


def test_a_copy_keeps_the_binding_and_counts_anew(registry: OpRegistry) -> None:
    call = OpCall("rms_norm", "standard", registry)
    call.bind("cpu", ["narrow"], strict=True, site="here")
    call(*arguments())
    call.force_reference(True)
    twin = copy.deepcopy(call)
    call.force_reference(False)
    assert twin.calls == {} and (twin.site, twin.strict, twin.providers) == ("here", True, ("narrow",))
    twin(*arguments())
    assert call.calls == twin.calls == {"narrow": 1}


def test_a_pickle_keeps_the_binding_and_counts_anew() -> None:
    call = OpCall("rms_norm", "standard")
    call.bind("cpu", [], strict=True, site="here")
    call(*arguments())
    twin = pickle.loads(pickle.dumps(call))
    assert twin.calls == {} and (twin.site, twin.strict, twin.providers) == ("here", True, ())
    assert torch.equal(twin(*arguments()), call(*arguments()))
    assert twin.calls == {"reference": 1}


def test_binding_a_model_names_its_sites(registry: OpRegistry) -> None:
    model = Norms(registry)
    assert [site for site, _ in op_calls(model)] == ["rms_norm", "inner.add_rms_norm"]
    bind_model(model, "cpu", ["narrow"], reference_only=["add_rms_norm"], strict=True)
    with torch.no_grad():
        model(torch.randn(2, 7))
    names = "site", "op", "variant", "provider", "calls", "fallbacks"
    assert [tuple(row[name] for name in names) for row in usage(model)] == [
        ("rms_norm", "rms_norm", "standard", "narrow", 1, []),
        ("inner.add_rms_norm", "add_rms_norm", "standard", "reference", 1, []),
    ]


def test_usage_before_and_after_a_fallback(registry: OpRegistry) -> None:
    model = Norms(registry).double()
    bind_model(model, "cpu", ["narrow"], reference_only=["add_rms_norm/standard"])
    assert [(row["provider"], row["calls"]) for row in usage(model)] == [("narrow", 0), ("reference", 0)]
    with torch.no_grad():
        model(torch.randn(2, 7).double())
    assert usage(model)[0]["fallbacks"] == [{"provider": "narrow", "reason": ONLY_FLOAT32, "calls": 1}]


def test_using_reference_forces_it_and_lets_go(registry: OpRegistry, provider: Float32Norm) -> None:
    model = Norms(registry)
    bind_model(model, "cpu", ["narrow"])
    with torch.no_grad():
        with using_reference(model), using_reference(model):
            model(torch.randn(2, 7))
            assert model.rms_norm.calls == {"reference": 1} and model.rms_norm.preferred() == "reference"
        model(torch.randn(2, 7))
    assert len(provider.served) == 1 and model.rms_norm.fallbacks == {}
    with pytest.raises(RuntimeError), using_reference(model):
        raise RuntimeError
    assert model.rms_norm.preferred() == "narrow"


def test_using_reference_may_be_strict(registry: OpRegistry) -> None:
    call = OpCall("rms_norm", "standard", registry)
    call.bind("cpu", ["narrow"], strict=True)
    call.force_reference(True)
    assert call(*arguments(torch.float64)).dtype == torch.float64


def test_the_default_registry_is_built_once() -> None:
    assert default_registry() is default_registry()
    assert len(default_registry().ops) == 51
