"""A port on as many Ascend cards as it takes: layout, memory, constraints, roofline and the vendor's operators."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from porter.adaptation import Port
from porter.errors import PorterError, Refusal
from porter.parallel_layout import checked_layout, experts_of
from porter.plan_cards import MOST_CARDS, Alternative, CardPlan, Planner
from porter.plan_memory import RESERVE, Load, Stored
from porter.plan_ops import OpOnChip, ops_on_chip
from porter.plan_schemes import KernelVerdict, Storage, judge
from porter.quantization import ALIASES


@dataclass(frozen=True)
class Deployment:
    """The plan of a port on Ascend cards. `why` says how the layout was chosen, `ops` what each Op becomes there."""

    model_type: str
    chip: str
    scheme: str
    load: Load
    card: CardPlan
    why: str
    kernels: tuple[KernelVerdict, ...]
    alternatives: tuple[Alternative, ...]
    ops: tuple[OpOnChip, ...]
    ops_scheme: str

    @property
    def possible(self) -> bool:
        """Whether the model fits and the layout meets every constraint."""
        return self.card.fits and not self.card.broken

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        card = self.card
        result = {key: value for key, value in asdict(self).items() if key != "card"}
        sizes = {"bytes": card.bytes, "usable_bytes": card.usable, "memory_bytes": card.memory, "reserve": RESERVE}
        layout = {**asdict(card.layout), "cards": card.layout.cards, "dp": card.layout.dp}
        layout["modules"] = [_module_json(row) for row in card.rows]
        result["layout"] = {**layout, "expert_tp": card.layout.expert_tp}
        for part in ("weights", "cache", "workspace", "constraints", "roofline"):
            result[part] = [asdict(each) for each in getattr(card, part)]
        return result | {"memory": sizes, "fits": card.fits, "possible": self.possible}


def _module_json(row: Stored) -> dict[str, Any]:
    held = row.held
    shapes = {"shape": list(held.whole), "local_shape": list(held.local), "split": held.split}
    return {
        "name": held.name,
        "kind": held.kind,
        "layers": held.layers,
        **shapes,
        "format": row.form.name,
        "bytes": row.bytes,
    }


def plan_deployment(
    port: Port, scheme: str | None, load: Load, tp: int | None = None, ep: int | None = None
) -> Deployment:
    """The plan of `port`, made in any scheme, for `load`; without sizes on the fewest cards, without a scheme
    in the port's own.

    Raises PorterError for sizes or a load that contradict each other or the model, and Refusal where no number of cards
    up to MOST_CARDS holds the model.
    """
    for name, value in (("--context", load.context), ("--batch", load.batch)):
        if value < 1:
            raise PorterError(f"{name} {value}: must be at least 1")
    planner = Planner(port, load)
    plan = deployment(planner, ALIASES.get(scheme, scheme) if scheme else port.scheme, tp, ep)
    return replace(plan, alternatives=planner.alternatives())


def deployment(planner: Planner, scheme: str, tp: int | None = None, ep: int | None = None) -> Deployment:
    """`plan_deployment` without its alternatives."""
    port, storage = planner.port, planner.storage(scheme)
    if tp is None and ep is None:
        card = planner.smallest(storage)
        if card is None:
            name, chip = port.reference.name, port.chip.name
            raise Refusal(f"{name}: does not fit {MOST_CARDS} cards of {chip} in {storage.name}")
        why = _why(planner, storage, card)
    else:
        sizes = (1 if size is None else size for size in (tp, ep))
        card, why = planner.card(storage, checked_layout(port.config, *sizes)), "as given by --tp and --ep"
    return Deployment(
        model_type=port.family.model_type,
        chip=port.chip.name,
        scheme=storage.name,
        load=planner.load,
        card=card,
        why=why,
        kernels=judge(storage, port.chip, planner.experts),
        alternatives=(),
        ops=ops_on_chip(planner.calls(storage.port_as, card.layout), port.chip),
        ops_scheme=storage.port_as,
    )


def _why(planner: Planner, storage: Storage, card: CardPlan) -> str:
    said = f"the fewest cards, in powers of two, that hold the model with {RESERVE:.0%} of each card's memory left"
    fewer = [layout for choices in planner.layouts() for layout in choices if layout.cards == card.layout.cards // 2]
    if fewer:
        plans = [planner.card(storage, layout) for layout in fewer]
        least = min(plans, key=lambda plan: (bool(plan.broken), plan.bytes))
        reason = f"{least.bytes / 1e9:.1f} GB a card at best, {least.usable / 1e9:.1f} GB usable"
        if least.fits and least.broken:
            reason = f"{least.broken[0].needs} ({least.broken[0].numbers})"
        said += f"; {card.layout.cards // 2} do not: {reason}"
    if experts_of(planner.config):
        said += f". Of the layouts of {card.layout.cards} cards, the one whose roofline decodes the batch fastest"
    return said
