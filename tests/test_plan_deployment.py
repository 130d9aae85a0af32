"""Plans of real models on Ascend cards: sizes against an independent count, formulas evaluated, verdicts by chip."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import ascend_plans
from porter.adaptation import Port, plan_port
from porter.chips.catalogue import load_catalogue
from porter.cli import app
from porter.cli.plan_view import per_second, reservations
from porter.errors import Refusal
from porter.kernels.registry import default_registry
from porter.models.presets import preset
from porter.parallel_layout import Layout, local_config
from porter.plan_cards import Planner
from porter.plan_deployment import deployment, plan_deployment
from porter.plan_memory import Load, Worked
from porter.plan_ops import Observed, observed_calls, ops_on_chip, shallow_config
from porter.plan_roofline import Card, decode, prefill
from porter.plan_schemes import PLANNED, judge
from porter.quantization import SCHEMES, scheme_named

LOAD = Load(context=8192, batch=16)


@functools.cache
def port_of(model: str, chip: str = "ascend-910b", scheme: str | None = None) -> Port:
    if chip != "ascend-910b":
        return dataclasses.replace(port_of(model), chip=load_catalogue().get(chip))
    return plan_port(model, chip, scheme=scheme)


@functools.cache
def planner_of(model: str, chip: str = "ascend-910b") -> Planner:
    return Planner(port_of(model, chip), LOAD)


def evaluated(figure: Worked) -> float:
    """The figure's arithmetic as a number: words are left out, units of bytes multiply."""
    text = figure.arithmetic.partition(";")[0]
    text = re.sub(r"(?<=\d),(?=\d)", "", text).replace("^", "**")
    for unit, factor in (("GB/s", "*1e9"), ("GB", "*1e9"), ("MB", "*1e6"), ("MiB", "*2**20")):
        text = re.sub(rf"\b{unit}(?![\w/])", factor, text)
    text = re.sub(r"\bx\b", "*", text)
    text = re.sub(r"(?<![\w.])[A-Za-z_][\w./'-]*", lambda m: m[0] if m[0] in ("max", "min") else "", text)
    return float(eval(text)) * (1e3 if figure.unit == "ms" else 1.0)


def figures_of(model: str, chip: str, scheme: str, layout: Layout) -> list[Worked]:
    planner = planner_of(model, chip)
    plan = planner.card(planner.storage(scheme), layout)
    regimes = [figure for regime in plan.roofline for figure in regime.figures]
    return [*plan.weights, *plan.cache, *plan.workspace, *regimes]


@pytest.mark.parametrize(
    ("model", "chip", "scheme", "layout"),
    [
        ("deepseek-v3", "ascend-910b", "w8a8", Layout(4, 16)),
        ("deepseek-v3.2", "ascend-950", "mxfp4", Layout(2, 8)),
        ("deepseek-v3.2", "ascend-910c", "w4a8", Layout(8, 2)),
        ("qwen3-235b-a22b", "ascend-910b", "bf16", Layout(8, 16)),
        ("qwen3-32b", "ascend-910b", "w8a16", Layout(2, 1)),
        ("qwen3-next-80b-a3b", "ascend-950", "mxfp8", Layout(1, 1)),
    ],
)
def test_every_formula_gives_its_figure(model: str, chip: str, scheme: str, layout: Layout) -> None:
    for figure in figures_of(model, chip, scheme, layout):
        assert evaluated(figure) == pytest.approx(figure.value, rel=2e-3), (figure.name, figure.arithmetic)


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("deepseek-v3", "w4a8"),
        ("deepseek-v3", "deepseek-w8a8"),
        ("qwen3-32b", "w8a16"),
        ("qwen3-next-80b-a3b", "w8a8"),
        ("qwen3-next-80b-a3b", "bf16"),
    ],
)
def test_on_one_card_the_weights_are_those_of_the_port(model: str, scheme: str) -> None:
    planner = planner_of(model)
    plan = planner.card(planner.storage(scheme), Layout(1, 1))
    port = port_of(model) if scheme == "bf16" else port_of(model, scheme=scheme)
    assert port.scheme == scheme and sum(w.value for w in plan.weights) == port.plan.weight_bytes
    # Published counts have the routers' biases, which are buffers here.
    assert port.plan.parameters == pytest.approx(preset(model).published_parameters, rel=1e-6)


def test_figures_that_can_be_worked_out_by_hand() -> None:
    planner = planner_of("deepseek-v3")
    plan = planner.card(planner.storage("w8a8"), Layout(4, 16))
    figures = {figure.name: figure.value for figure in (*plan.weights, *plan.cache)}
    assert figures["cache of one token"] == 61 * (512 + 64) * 2
    assert figures["cache"] == 4 * 8192 * 61 * 576 * 2
    expert = 58 * 16 * (3 * 2048 * 7168 + 4 * (2 * 2048 + 7168))
    assert figures["routed experts"] == expert
    alone = plan.roofline[0]
    assert alone.bound == "memory" and alone.tokens_per_second is not None
    read = next(f.value for f in alone.figures if f.name == "bytes read")
    assert alone.tokens_per_second == pytest.approx(1.6 * 2**40 / read)
    other = planner_of("qwen3-235b-a22b")
    replicated = other.card(other.storage("bf16"), Layout(8, 8))
    assert replicated.cache[0].value == 94 * 2 * 1 * 128 * 2


@pytest.mark.parametrize(("model", "layers"), [("qwen3-32b", 2), ("qwen3-235b-a22b", 2), ("deepseek-v3", 4)])
def test_operations_are_those_that_the_ops_count(model: str, layers: int) -> None:
    """The products of the roofline against the costs of the calls that a few layers make."""
    port, load, layout = port_of(model), Load(context=512, batch=4), Layout(2, 1)
    config = shallow_config(port.config)
    config.porter = {}
    shallow = Planner(dataclasses.replace(port, config=config), load)
    assert config.num_hidden_layers == layers
    rows = shallow.card(shallow.storage("bf16"), layout).rows
    card = Card(config, local_config(config, layout), layout, port.chip, rows, 0, 2)
    calls = observed_calls(port.source, config, scheme_named("bf16"), port.dtype, layout, load)
    registry = default_registry()
    for regime, step in (("decode", decode(card, load)), ("prefill", prefill(card, load))):
        mine = sum(f.value for f in step.figures if f.unit == "operations")
        cost = sum(registry.op(c.op, c.variant).cost(*c.arguments).flops for c in calls if c.regime == regime)
        assert mine == pytest.approx(cost, rel=0.05), regime


def test_low_bit_products_by_chip() -> None:
    def verdicts(scheme: str, chip: str) -> dict[str, str]:
        planner = planner_of("qwen3-next-80b-a3b", chip)
        return {f"{k.use} {k.format}": k.verdict for k in judge(planner.storage(scheme), planner.port.chip, True)}

    for chip in ("ascend-910b", "ascend-910c"):
        assert verdicts("bf16", chip) == {"linears bfloat16": "native", "experts bfloat16": "native"}
        assert verdicts("w8a8", chip)["linears int8"] == verdicts("w8a8", chip)["experts int8"] == "native"
        assert verdicts("w4a8", chip)["experts int4"] == "native"
        for scheme in ("fp8", "mxfp8", "mxfp4"):
            assert set(verdicts(scheme, chip).values()) == {"fallback"}
    for scheme in ("fp8", "mxfp8", "mxfp4"):
        assert set(verdicts(scheme, "ascend-950").values()) == {"native"}


def test_what_a_chip_cannot_multiply_is_held_in_bfloat16() -> None:
    old, new = planner_of("qwen3-32b"), planner_of("qwen3-32b", "ascend-950")
    fallback, bf16 = (old.card(old.storage(scheme), Layout(2, 1)) for scheme in ("mxfp4", "bf16"))
    native = new.card(new.storage("mxfp4"), Layout(2, 1))
    assert sum(w.value for w in fallback.weights) == sum(w.value for w in bf16.weights)
    assert sum(w.value for w in native.weights) < 0.4 * sum(w.value for w in bf16.weights)
    assert "weights fall back to bfloat16" in " ".join(c.numbers for c in fallback.constraints)


@pytest.mark.parametrize(
    ("model", "chip", "scheme", "layout", "needs", "met"),
    [
        ("deepseek-v3", "ascend-910b", "w4a8", Layout(32, 1), "at most 16 cards share an expert", False),
        ("qwen3-32b", "ascend-910b", "w8a16", Layout(1, 1), "last dimensions of quantized products", True),
        ("qwen3-next-80b-a3b", "ascend-910b", "bf16", Layout(8, 1), "KV heads divide, or are replicated", True),
        ("deepseek-v3", "ascend-910b", "w4a8", Layout(16, 1), "at most 16 cards share an expert", True),
    ],
)
def test_constraints(model: str, chip: str, scheme: str, layout: Layout, needs: str, met: bool) -> None:
    planner = planner_of(model, chip)
    plan = planner.card(planner.storage(scheme), layout)
    found = {c.needs: c.met for c in plan.constraints if needs in c.needs}
    assert list(found.values()) == [met], plan.constraints


def test_the_dispatch_of_experts_has_its_limits() -> None:
    def broken(model: str, chip: str, layout: Layout) -> list[str]:
        planner = planner_of(model, chip)
        return [c.needs for c in planner.card(planner.storage("bf16"), layout).broken]

    assert broken("qwen3-235b-a22b", "ascend-910b", Layout(8, 8)) == []
    many = Planner(port_of("qwen3-235b-a22b"), Load(512, 4096))
    assert [c.needs for c in many.card(many.storage("bf16"), Layout(1, 8)).broken] == ["tokens a card at most 256"]
    later = planner_of("qwen3-235b-a22b", "ascend-950")
    undocumented = later.card(later.storage("bf16"), Layout(8, 8))
    assert [c.needs for c in undocumented.constraints if c.met is None]


def test_the_fewest_cards() -> None:
    planner = planner_of("qwen3-32b")
    chosen = planner.smallest(planner.storage("bf16"))
    assert chosen is not None and chosen.layout == Layout(2, 1) and chosen.fits
    assert not planner.card(planner.storage("bf16"), Layout(1, 1)).fits
    huge = Planner(port_of("qwen3-32b"), Load(context=40960, batch=1 << 20))
    assert huge.smallest(huge.storage("bf16")) is None
    with pytest.raises(Refusal, match="does not fit 512 cards of ascend-910b in bf16") as caught:
        plan_deployment(port_of("qwen3-32b"), None, Load(40960, 1 << 20))
    assert caught.value.exit_code == 1


def test_ops_are_judged_at_the_widths_of_a_card() -> None:
    port = port_of("qwen3-32b", scheme="w8a8")
    calls = observed_calls(port.source, port.config, scheme_named("w8a8"), port.dtype, Layout(4, 1), LOAD)
    weights = {c.site: tuple(c.arguments[1].shape) for c in calls if c.op == "linear" and c.regime == "decode"}
    assert weights["model.layers.0.self_attn.qkv_proj.linear"] == ((64 + 2 * 8) // 4 * 128, 5120)
    assert weights["model.layers.1.mlp.down_proj.linear"] == (5120, 25600 // 4)
    assert {c.regime for c in calls} == {"prefill", "decode"} and not any(".layers.2." in c.site for c in calls)
    rows = {(o.op, o.variant, o.regime): o for o in ops_on_chip(calls, port.chip)}
    norm = rows["add_rms_norm", "standard", "decode"]
    assert norm.calls == ("npu_add_rms_norm",) and norm.refused is None
    assert norm.arguments == "bfloat16[16, 1, 5120], bfloat16[16, 1, 5120], bfloat16[5120]"


def test_a_refusal_names_the_constraint_at_the_real_width() -> None:
    port = port_of("qwen3-32b")
    wide = torch.empty(1, 70000, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128, 70000, dtype=torch.int8, device="meta")
    scale = torch.empty(128, device="meta")
    (row,) = ops_on_chip([Observed("here", "linear", "w8a8", "decode", (wide, weight, scale, None))], port.chip)
    assert row.refused is not None and "65535" in row.refused


def test_the_command_prints_its_plan_and_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["adapt", "qwen3-32b", "--target", "ascend", "--plan", "--tp", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["deployment"]
    assert plan["possible"] and plan["fits"] and plan["layout"]["cards"] == 4 and plan["memory"]["reserve"] == 0.1
    assert {row["scheme"] for row in plan["alternatives"]} == {*SCHEMES, *PLANNED} - {"fp32", "w4a8", "deepseek-w8a8"}
    assert app.run(["adapt", "qwen3-32b", "--target", "ascend", "--plan", "--tp", "1"]) == 1
    text = capsys.readouterr().out
    assert "not possible" in text and "do not fit the 57.6 GB usable" in text


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--target", "ascend", "--plan", "--tp", "3"], 1, "does not divide the model"),
        (["--target", "ascend", "--plan", "--tp", "0"], 2, "at least 1"),
        (["--target", "ascend", "--plan", "--ep", "2"], 2, "no routed experts"),
        (["--target", "ascend", "--plan", "--batch", "0"], 2, "--batch 0"),
        (["--target", "ascend", "--plan", "--scheme", "w3"], 2, "--scheme w3"),
        (["--target", "ascend", "--plan", "--scheme", "w4a8"], 2, "the model has no routed experts"),
        (["--target", "cpu", "--plan", "--tp", "2"], 2, "--tp and --ep"),
    ],
)
def test_what_cannot_be_planned(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["adapt", "qwen3-32b", *arguments]) == status
    assert says in capsys.readouterr().err


def test_a_scheme_that_porter_does_not_write_is_planned_over_another() -> None:
    plan = plan_deployment(port_of("qwen3-32b", "ascend-950"), "mxfp8", LOAD, 4)
    assert (plan.scheme, plan.ops_scheme) == ("mxfp8", "bf16") and plan.ops
    assert plan.to_json()["kernels"][0]["verdict"] == "native"


def test_a_scheme_that_the_chip_has_no_products_for_is_said_not_to_be_written() -> None:
    """`porter adapt` refuses w8a8 on the 950: no page lists it for npu_dynamic_quant."""
    plan = plan_deployment(port_of("qwen3-32b", "ascend-950"), "w8a8", LOAD, 4).to_json()
    converts = {row["scheme"]: row["converts"] for row in plan["alternatives"]}
    assert (converts["bf16"], converts["w8a8"], converts["mxfp8"]) == (True, False, False)
    said = "; ".join(reservations(plan))
    assert "in plain torch, since refused: linear/w8a16, linear/w8a8" in said
    assert said.endswith("porter does not write w8a8 for ascend-950 yet")
    assert not reservations(plan_deployment(port_of("qwen3-32b"), "w8a8", LOAD, 4).to_json())


def test_a_sparse_prefill_counts_the_keys_that_its_first_queries_lack() -> None:
    found = figures_of("deepseek-v3.2", "ascend-910b", "bf16", Layout(16, 32))
    attention = [f.arithmetic for f in found if f.name.startswith("attention in")][-1]
    seen = sum(min(i, 2048) for i in range(1, 8193)) / 8192
    assert "8192 queries x 1792 keys" in attention and seen == pytest.approx(1792, rel=1e-3)


def test_the_document_holds_what_the_planner_says_today() -> None:
    lines = (Path(__file__).parents[1] / "docs" / "ascend_plans.md").read_text(encoding="utf-8").splitlines()
    for model, scheme in (("qwen3-32b", "w8a8"), ("deepseek-v3", "w8a8")):
        row = ascend_plans.cell(deployment(planner_of(model), scheme).to_json())
        assert f"| {' | '.join([model, scheme, *row])} |" in lines
    assert "## ascend-950" in lines


def test_rates_are_read_without_powers_of_ten() -> None:
    said = [per_second(rate) for rate in (40463.4, 1183.2, 211.37)]
    assert said == ["40,463 tokens/s", "1,183 tokens/s", "211.4 tokens/s"]


def test_shipped_models_are_planned_and_caches_that_are_not_worked_out_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["adapt", "tiny-deepseek-v3", "--target", "ascend", "--plan", "--tp", "2", "--ep", "2"]) in (0, 1)
    assert "2 x ascend-910b: TP 2, EP 2" in capsys.readouterr().out
    assert app.run(["adapt", "deepseek-v4-flash", "--target", "ascend", "--plan"]) == 2
    assert "compressed keys" in capsys.readouterr().err


def test_a_vocabulary_over_the_operators_limit_is_cut_and_takes_no_more_cards() -> None:
    """151936 rows of int8 are over the 65535 of one product, on one card and on two: the kernel makes several."""
    plan = deployment(planner_of("qwen3-32b"), "w8a8")
    assert plan.card.layout.cards == 2
    (found,) = [c for c in plan.card.constraints if c.needs.startswith("last dimensions of quantized products")]
    assert found.met and "75968" in found.numbers and "in 2 products" in found.numbers
