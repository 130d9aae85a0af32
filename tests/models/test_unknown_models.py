"""Models that nobody told porter about: what fits is ported and proven, the rest stays, and each class has a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from lark import AUTO_MAP, lark, planned, ported

from porter.cli.app import run
from porter.errors import PorterError, Refusal
from porter.export import code_files
from porter.models.family import family_of
from porter.models.proof import BOUND

PLAIN = {"Scale": "standard", "FeedForward": "w1 gates w3", "Attention": "half rope"}
SILU = "F.silu(self.w1(x)) * self.w3(x)"
ROOT = "math.sqrt(self.head_size)"
SCALED = ".to(x.dtype) * self.scale"

RIGHT = {
    "a norm with 1 + w": ((SCALED, ".to(x.dtype) * (1 + self.scale)"), {"Scale": "zero_centered"}),
    "gate and up swapped": ((SILU, "F.silu(self.w3(x)) * self.w1(x)"), {"FeedForward": "w3 gates w1"}),
    "the key turned first": (
        ("q, k = turn(q, cos, sin), turn(k, cos, sin)", "k, q = turn(k, cos, sin), turn(q, cos, sin)"),
        {},
    ),
    "the residual taken after the norm": (
        ("x = x + self.attn(self.norm1(x), cos", "x = self.norm1(x)\n        x = x + self.attn(x, cos"),
        {},
    ),
    "the factor in an attribute": (
        (
            f"scores = q @ k.transpose(2, 3) / {ROOT}",
            "self.scale = self.head_size**-0.5\n        scores = q @ k.transpose(2, 3) * self.scale",
        ),
        {},
    ),
    "a list of layers that inherits": (
        ("def turn(x", "class Wider(FeedForward):\n    pass\n\n\ndef turn(x"),
        ("self.ffn = FeedForward(config)", "self.ffn = Wider(config)"),
        {"Wider": "w1 gates w3", "FeedForward": None},
    ),
    "neighbours turn": (
        (
            "first, second = x.chunk(2, dim=-1)\n    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * "
            "sin[:, None]",
            "half = cos.shape[-1] // 2\n    cos, sin = (t[:, None, :, :half] for t in (cos, sin))\n"
            "    a, b = x[..., ::2], x[..., 1::2]\n"
            "    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)",
        ),
        {"Attention": "interleaved rope"},
    ),
}

LEFT = {
    "turned the other way": ((" * sin[:, None]", " * -sin[:, None]"), "Attention", "float64 proof"),
    "1/d for 1/sqrt(d)": ((ROOT, "self.head_size"), "Attention", "float64 proof"),
    "eps outside the root": (
        ("torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.tiny)",
         "(1 / (wide.square().mean(-1, keepdim=True).sqrt() + self.tiny))"),
        "Scale", "float64 proof",
    ),
    "no silu": ((SILU, "F.gelu(self.w1(x)) * self.w3(x)"), "FeedForward", "proof|something else to its act"),
    "a clamp that few values reach": (
        (SILU, "F.silu(self.w1(x)).clamp(max=1e4) * self.w3(x)"), "FeedForward", r"limits values .*clamp\(max=10000"),
    "a factor beyond some length": (
        (f"/ {ROOT} + mask", f"/ {ROOT} / (2 if length > 4096 else 1) + mask"), "Attention", "threshold .length > 4096",
    ),
    "a state that only decoding shows": (
        (f"return self.w2({SILU})",
         f"out = self.w2({SILU})\n        if x.shape[1] == 1:\n            out = out + self.before[:, -1:]\n"
         "        self.before = out\n        return out"),
        "FeedForward", "with it the model differs in decode",
    ),
    "scores that are capped": ((f"/ {ROOT} + mask", f"/ {ROOT}\n        scores = 50 * torch.tanh(scores / 50) + mask"),
                               "Attention", "float64 proof"),
}  # fmt: skip


@pytest.mark.parametrize("trap", RIGHT)
def test_a_trap_that_is_ported_right(trap: str, tmp_path: Path) -> None:
    *replaced, changed = RIGHT[trap]
    port = planned(lark(tmp_path / "lark", *replaced))  # type: ignore[arg-type]
    assert ported(port) == {n: v for n, v in (PLAIN | dict(changed)).items() if v is not None}  # type: ignore[arg-type]
    assert port.source.proof.passed and not port.source.proof.skipped
    assert max(c.error for c in port.source.classes) < BOUND


@pytest.mark.parametrize("trap", LEFT)
def test_a_trap_that_is_left_with_its_reason(trap: str, tmp_path: Path) -> None:
    replaced, kind, reason = LEFT[trap]
    port = planned(lark(tmp_path / "lark", replaced))
    assert ported(port) == {n: v for n, v in PLAIN.items() if n != kind}
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(port.source.left[kind])
    assert port.source.proof.passed


def test_a_state_that_outlives_its_sequence_is_a_no(tmp_path: Path) -> None:
    counted = f"self.calls = getattr(self, 'calls', 0) + 1\n        return self.calls * self.w2({SILU})"
    directory = lark(tmp_path / "lark", (f"return self.w2({SILU})", counted))
    with pytest.raises(Refusal, match="no single class is to blame"):
        planned(directory)


def test_names_that_tell_query_and_key_wrong(tmp_path: Path) -> None:
    swapped = (
        ("self.wq = nn.Linear(config.dim, config.n_heads", "self.wq = nn.Linear(config.dim, config.n_kv_heads"),
        ("self.wk = nn.Linear(config.dim, config.n_kv_heads", "self.wk = nn.Linear(config.dim, config.n_heads"),
        ("q = self.wq(x)", "q = self.wX(x)"),
        ("k = self.wk(x)", "k = self.wq(x)"),
        ("q = self.wX(x)", "q = self.wk(x)"),
    )
    port = planned(lark(tmp_path / "lark", *swapped))
    assert ported(port) == PLAIN
    assert [e.sources for e in port.correspondence.entries if e.target.endswith("0.attn.qkv_proj")] == [
        tuple(f"model.blocks.0.attn.{name}" for name in ("wk", "wq", "wv"))
    ]


ROUTED = """class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.pick = Pick(config)
        self.parts = nn.ModuleList([Part(config) for _ in range(5)])

    def forward(self, x):
        _, weights, chosen = self.pick(x)
        every = torch.stack([part(x) for part in self.parts], dim=-2).flatten(0, 1)
        rows = every.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
        return (rows * weights[..., None]).sum(1).view(x.shape)


class Pick(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = 2
        self.matrix = nn.Parameter(torch.randn(5, config.dim))

    def forward(self, x):
        logits = F.linear(x.flatten(0, 1), self.matrix)
        CHOICE
        return logits, weights, chosen


class Part(nn.Module):"""


@pytest.mark.parametrize(
    ("choice", "variant"),
    [
        ("weights, chosen = logits.softmax(-1).topk(2)", "softmax"),
        ("weights, chosen = logits.topk(2); weights = weights.softmax(-1)", "softmax, renormalised"),
        ("weights, chosen = F.normalize(logits, dim=-1).softmax(-1).topk(2)", None),
        ("weights, chosen = logits.sigmoid().topk(2)", None),
        ("weights, chosen = logits.softmax(-1).topk(2); weights = weights * 1.5", None),
    ],
)
def test_what_a_router_normalises(choice: str, variant: str | None, tmp_path: Path) -> None:
    text = ROUTED.replace("CHOICE", choice)
    port = planned(lark(tmp_path / "lark", ("class FeedForward(nn.Module):", text)))
    assert ported(port).get("Pick") == variant
    assert ported(port)["Part"] == "w1 gates w3"
    if variant is None:
        assert "float64 proof" in port.source.left["Pick"]


def test_every_class_of_the_file_has_a_reason(tmp_path: Path) -> None:
    port = planned(lark(tmp_path / "lark", ("class LarkPre", "class Idle(nn.Module):\n    pass\n\n\nclass LarkPre")))
    assert port.plan.left == {
        "Block": "no rewrite knows it",
        "LarkModel": "no rewrite knows it",
        "LarkForCausalLM": "no rewrite knows it",
        "LarkPreTrainedModel": "a model of this configuration has none",
        "Idle": "a model of this configuration has none",
    }


def test_a_class_that_stays_must_not_inherit_from_a_ported_one(tmp_path: Path) -> None:
    heir = "class Gated(FeedForward):\n    def forward(self, x):\n        return torch.tanh(super().forward(x))\n\n\n"
    replaced = (("def turn(x", f"{heir}def turn(x"), ("self.ffn = FeedForward(config)", "self.ffn = Gated(config)"))
    port = planned(lark(tmp_path / "lark", *replaced))
    assert ported(port) == {n: v for n, v in PLAIN.items() if n != "FeedForward"}
    assert "gated_mlp: " in port.source.left["Gated"] or "float64 proof" in port.source.left["Gated"]


def test_a_model_of_which_nothing_can_be_ported_is_a_no_with_the_list(tmp_path: Path) -> None:
    directory = lark(
        tmp_path / "lark", (SCALED, ".to(x.dtype) * self.scale**2"), (SILU, "self.w1(x) * self.w3(x)"), (ROOT, "3.0")
    )
    with pytest.raises(Refusal, match=r"no class of .* can be ported \(.*Block: no rewrite knows it") as raised:
        planned(directory)
    for name in PLAIN:
        assert f"{name}: " in str(raised.value)
    assert raised.value.exit_code == 1 and "\n" not in str(raised.value)


def test_a_model_that_fails_at_reduced_width_is_a_no_with_what_it_raised(tmp_path: Path) -> None:
    wide = "assert config.dim >= 64, 'too narrow'\n        self.w1 = nn.Linear(config.dim"
    directory = lark(tmp_path / "lark", ("self.w1 = nn.Linear(config.dim", wide))
    with pytest.raises(Refusal, match=r"fails at reduced width \(AssertionError: too narrow\)"):
        planned(directory)


def test_code_that_is_not_trusted_is_not_run(tmp_path: Path) -> None:
    directory = lark(tmp_path / "lark", ("import math\n", "raise SystemExit('this was run')\n"))
    from porter.adaptation import plan_port

    with pytest.raises(PorterError, match="does not know; pass --trust-remote-code"):
        plan_port(str(directory), "cpu")


def test_code_that_does_not_import_is_named(tmp_path: Path) -> None:
    directory = lark(tmp_path / "lark", ("from torch import nn\n", "from torch import nn, no_such_name\n"))
    with pytest.raises(PorterError, match=r"modeling_lark.LarkForCausalLM cannot be imported \(ImportError"):
        planned(directory)


def test_code_that_ends_python_is_named(tmp_path: Path) -> None:
    directory = lark(tmp_path / "lark", ("import math\n", "import math\nraise SystemExit(0)\n"))
    with pytest.raises(PorterError, match=r"modeling_lark.LarkForCausalLM cannot be imported \(SystemExit: 0\)"):
        planned(directory)
    config = directory / "configuration_lark.py"
    config.write_text("raise SystemExit(0)\n" + config.read_text())
    with pytest.raises(PorterError, match=r"config.json: 0"):
        planned(directory)


def test_code_that_ends_python_later_does_not_pass_for_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = "raise SystemExit(0)\n        self.w1 = nn.Linear(config.dim"
    directory = lark(tmp_path / "lark", ("self.w1 = nn.Linear(config.dim", ends))
    assert run(["adapt", str(directory), "--target", "cpu", "--plan", "--trust-remote-code"]) == 2
    assert "code that was run ended porter (SystemExit: 0)" in capsys.readouterr().err


@pytest.mark.parametrize("thing", ["5", "type('Thing', (), {})"])
def test_what_is_no_model_class_is_named(tmp_path: Path, thing: str) -> None:
    auto_map = AUTO_MAP | {"AutoModelForCausalLM": "modeling_lark.THING"}
    code = "from torch import nn\n", f"from torch import nn\nTHING = {thing}\n"
    directory = lark(tmp_path / "lark", code, auto_map=auto_map)
    with pytest.raises(PorterError, match=r"modeling_lark.THING is no model class of transformers"):
        planned(directory)


IMPORT_CONFIG = "from .configuration_lark import LarkConfig"


@pytest.mark.parametrize(
    "line", ["from  .configuration_lark\timport LarkConfig", "from transformers import PreTrainedConfig as LarkConfig"]
)
def test_files_of_a_checkpoint_are_exported_however_they_are_named(tmp_path: Path, line: str) -> None:
    assert "configuration_lark.py" in code_files(planned(lark(tmp_path / "lark", (IMPORT_CONFIG, line))))


def test_a_file_of_a_checkpoint_is_not_replaced_by_porters(tmp_path: Path) -> None:
    name = "porter_kernels_contract"
    directory = lark(tmp_path / "lark", (IMPORT_CONFIG, f"{IMPORT_CONFIG}\nfrom .{name} import thing"))
    (directory / f"{name}.py").write_text("thing = 1\n")
    with pytest.raises(PorterError, match=f"imports {name}: porter writes files of such names"):
        code_files(planned(directory))


CORE = {"rms_norm", "attention", "decoder_layer"}
KNOWN_TO_TRANSFORMERS: list[tuple[str, dict[str, Any], set[str], dict[str, str]]] = [
    ("glm4", {}, {*CORE, "gated_mlp"}, {}),
    ("glm4", {"partial_rotary_factor": 1.0, "attention_bias": True}, {*CORE, "gated_mlp"}, {}),
    ("glm4_moe", {}, {*CORE, "gated_mlp", "router", "experts"}, {}),
    ("hunyuan_v1_dense", {"head_dim": 128}, {*CORE, "gated_mlp"}, {}),
    ("hunyuan_v1_moe", {"head_dim": 128}, {*CORE, "gated_mlp", "router", "experts"}, {}),
    ("minimax", {}, {"rms_norm", "attention", "router", "experts"}, {"MiniMaxDecoderLayer": "float64 proof"}),
    ("minimax_m2", {}, {*CORE, "router", "experts"}, {"MiniMaxM2SparseMoeBlock": "no attribute num_group"}),
    ("olmoe", {}, {*CORE, "router", "experts"}, {}),
    ("olmoe", {"clip_qkv": 8.0}, {*CORE, "router", "experts"} - {"attention"}, {"OlmoeAttention": "clamp"}),
    (
        "gpt_oss",
        {},
        {"rms_norm", "sink_attention"},
        {"GptOssExperts": "gate_up_proj_bias", "GptOssTopKRouter": "bias beside its weight"},
    ),
    ("gemma2", {}, {"rms_norm", "decoder_layer"}, {"Gemma2MLP": "none of its child modules computes silu"}),
    ("gemma3_text", {}, CORE, {"Gemma3MLP": "none of its child modules computes silu"}),
    ("phi3", {}, {"rms_norm", "gated_mlp"}, {"Phi3Attention": "no rewrite knows it"}),
    ("mixtral", {}, {*CORE, "router", "experts"}, {}),
    (
        "kimi_linear",
        {},
        {"rms_norm", "gated_mlp", "router", "experts"},
        {
            "KimiLinearDeltaAttention": "unknown parts: b_proj, conv1d, forget_gate",
            "KimiLinearForgetGate": "no rewrite knows it",
            "KimiLinearRMSNormGated": "float64 proof",
        },
    ),
]


@pytest.mark.parametrize(("model_type", "changes", "rewrites", "left"), KNOWN_TO_TRANSFORMERS)
def test_models_of_transformers_that_no_family_lists(
    model_type: str, changes: dict[str, Any], rewrites: set[str], left: dict[str, str]
) -> None:
    source = family_of(model_type).port(transformers.CONFIG_MAPPING[model_type](**changes))
    assert {c.candidate.rewrite for c in source.classes} >= rewrites
    assert source.proof.passed and not source.proof.skipped
    for name, reason in left.items():
        assert reason in source.left[name]
