"""Port a model to a chip: read, match, plan, prove, convert, export."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.calibration import Calibration, calibrated
from porter.checkpoint.convert import Progress
from porter.checkpoint.reader import Checkpoint
from porter.chips.catalogue import Chip, load_catalogue
from porter.correspondence import Correspondence
from porter.emulation import emulating
from porter.errors import PorterError, Refusal
from porter.fp8_blocks import block_size
from porter.kernel_check import KernelCheck, check_kernels
from porter.kernels.registry import default_registry
from porter.models.family import Family
from porter.models.own_code import family_of_checkpoint
from porter.models.port import PortedSource, source_on_meta
from porter.models.prediction import Prediction, build_layer
from porter.models.presets import ModelReference, resolve
from porter.plan import Plan, plan_of
from porter.port_dtype import default_scheme, dtype_written, float_dtype
from porter.quantization import scheme_named
from porter.quantized_modules import modules_of_scheme, quantized_modules
from porter.scheme_targets import refuse_on

UNBUILDABLE = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
)
"""What transformers raises when a config's fields contradict each other."""


@dataclass(frozen=True)
class Port:
    """A planned and proven port; `checks` are of this machine's kernels, `directory` is set once it was exported."""

    reference: ModelReference
    family: Family
    source: PortedSource
    config: Any
    chip: Chip
    scheme: str
    dtype: torch.dtype
    correspondence: Correspondence
    layout: Correspondence
    plan: Plan
    prediction: Prediction | None = None
    checks: tuple[KernelCheck, ...] = ()
    directory: Path | None = None
    calibration: Calibration | None = None

    def __repr__(self) -> str:
        where = "planned" if self.directory is None else f"in {str(self.directory)!r}"
        ported = f"{len(self.source.classes)} classes ported"
        return f"Port({self.reference.name!r} for {self.chip.name}, {self.scheme}, {ported}, {where})"

    def skeleton(self) -> nn.Module:
        """The ported model on the meta device, with narrower weights where the scheme puts them."""
        with torch.device("meta"):
            return self.source.model_class()(copy.deepcopy(self.config))

    def prediction_state(self) -> dict[str, torch.Tensor]:
        """The tensors of the ported prediction layers on the meta device, under their names in the port."""
        state: dict[str, torch.Tensor] = {}
        layers = self.prediction.layers if self.prediction is not None else ()
        for index, number in enumerate(layers):
            with torch.device("meta"):
                layer = build_layer(self.source.load(), self.config, index)
            state |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.state_dict().items()}
        return state


def plan_port(
    model: str, target: str, *, scheme: str | None = None, dtype: str | None = None, trust_remote_code: bool = False
) -> Port:
    """Read config and headers, match, and prove in float64 at reduced width; touches no weight.

    A checkpoint's own code runs only with `trust_remote_code`.

    Raises PorterError for an unknown model, chip, scheme or dtype, or a combination that porter does not port.
    """
    chip = load_catalogue().get(target)
    if chip.device != "cpu" and not chip.native_providers:
        raise PorterError(
            f"--target {target}: porter has no op provider for {chip.name} yet; cpu and ascend targets are ported"
        )
    reference = resolve(model, trust_remote_code)
    config = copy.deepcopy(reference.config)
    if getattr(config, "quantization_config", None) is not None:
        if reference.directory is not None:
            block_size(config, f"{reference.directory}/config.json")
        # The code and the plan do not depend on how the weights are stored.
        del config.quantization_config
    where = f"{reference.directory}/config.json" if reference.directory else f"preset {model}"
    chosen = scheme_named(scheme or default_scheme(config))
    computed_in = float_dtype(chosen.name, dtype or dtype_written(config, chosen.name), chip)
    family = family_of_checkpoint(config, reference.directory, f"{where}: model_type", trust_remote_code)
    source = _ported_source(family, config, chip, where)
    stored = stored_shapes(reference.directory)
    correspondence, layout = family.correspondence(config, source), family.checkpoint_layout(config, stored)
    config.porter = {"chip": chip.name, "scheme": chosen.name, "quantized": {}}
    if chosen.weight_dtype != computed_in:
        config.porter["quantized"] = quantized_modules(source, config, chosen)
        config.tie_word_embeddings = config.tie_word_embeddings and chosen.weight_dtype != torch.int8
    config.architectures = [family.class_name]
    config.dtype = computed_in
    plan = plan_of(family, source, config, chip, chosen.name, computed_in)
    refuse_on(chip, chosen, ((o.op, o.variant) for o in plan.ops), computed_in)
    port = Port(reference, family, source, config, chip, chosen.name, computed_in, correspondence, layout, plan)
    return with_prediction(port, stored)


def with_prediction(port: Port, stored: Collection[str]) -> Port:
    """`port` with its prediction layers, where the config calls for them and the names `stored` do not lack them."""
    prediction = port.family.predicting(port.reference.config, port.source, stored)
    for field in ("prediction_layers", "prediction_quantized"):
        port.config.porter.pop(field, None)
    if prediction is not None:
        port.config.porter["prediction_layers"] = list(prediction.layers)
        port.config.porter["prediction_quantized"] = {}
        scheme = scheme_named(port.scheme)
        if scheme.weight_dtype != port.dtype:
            with torch.device("meta"):
                layer = build_layer(port.source.load(), port.config, 0)
            port.config.porter["prediction_quantized"] = modules_of_scheme(layer, port.source.load().Linear, scheme)
    return dataclasses.replace(port, prediction=prediction)


def _ported_source(family: Family, config: Any, chip: Chip, where: str) -> PortedSource:
    try:
        return family.port(config, chip.device if chip.device == "cpu" else chip.name)
    except UNBUILDABLE as error:
        reason = str(error).strip().partition("\n")[0]
        if _builds(family, config):
            raise Refusal(
                f"{where}: nothing can be proven of the model, which fails at reduced width "
                f"({type(error).__name__}: {reason})"
            ) from error
        raise PorterError(f"{where}: no model can be built from it ({type(error).__name__}: {reason})") from error


def _builds(family: Family, config: Any) -> bool:
    """Whether upstream's own model of `config` can be built at all."""
    try:
        source_on_meta(config, family.module, family.class_name)
    except UNBUILDABLE:
        return False
    return True


def stored_shapes(directory: Path | None) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a checkpoint directory, by name; none where it holds no weights to read."""
    if directory is None or not any(directory.glob("*.safetensors")):
        return {}
    checkpoint = Checkpoint.open(directory)
    return {name: checkpoint.info(name).shape for name in checkpoint.names}


def adapt(
    model: str | Path,
    target: str = "cpu",
    *,
    scheme: str | None = None,
    dtype: str | None = None,
    output: str | Path | None = None,
    weights: str | Path | None = None,
    plan: bool = False,
    strict: bool = False,
    workers: int = 1,
    reference_only: tuple[str, ...] = (),
    allow_nonfinite: bool = False,
    trust_remote_code: bool = False,
    calibration: str | Path | None = None,
    notify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Port:
    """Port `model` to chip `target` and, unless `plan`, write the directory `output`.

    `calibration` is the data, or what was measured before, that schemes with static scales of activations need: see
    `porter.calibration`.

    `weights` names the checkpoint when `model` is a preset without one. `notify` is told what begins, `progress` how
    far the conversion is. Raises PorterError for bad input, and Refusal when the proof or a kernel's check fails or,
    with `strict`, when an Op has no native provider.
    """
    _refuse_unknown_ops(reference_only)
    if output is None and not plan:
        raise PorterError("--output is missing: name the directory to write, or pass --plan to stop before it")
    if output is not None and not plan:
        refuse_occupied(Path(output))
    tell = notify or (lambda message: None)
    tell(f"porting {model} to {target}, and proving the port in float64 ...")
    port = plan_port(str(model), target, scheme=scheme, dtype=dtype, trust_remote_code=trust_remote_code)
    fallbacks = [f"{o.op}/{o.variant} ({'; '.join(o.refused)})" for o in port.plan.ops if o.provider == "reference"]
    if strict and fallbacks:
        raise Refusal(f"--strict: no native provider for {', '.join(fallbacks)}")
    if plan or output is None:
        return port
    from porter.export import export

    checks = _kernel_checks(port, reference_only, tell)
    if weights is not None:
        stored = stored_shapes(Path(weights))
        layout = port.family.checkpoint_layout(port.reference.config, stored)
        port = with_prediction(dataclasses.replace(port, layout=layout), stored)
    source_weights = Path(weights) if weights else port.reference.directory
    port = calibrated(port, calibration, source_weights, trust_remote_code, tell)
    return export(
        dataclasses.replace(port, checks=checks),
        Path(output),
        weights=source_weights,
        workers=workers,
        reference_only=reference_only,
        allow_nonfinite=allow_nonfinite,
        progress=progress,
    )


def _refuse_unknown_ops(names: tuple[str, ...]) -> None:
    known = {name for op in default_registry().ops for name in (op[0], "/".join(op))}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PorterError(f"--reference-only {unknown[0]}: is no Op; see `porter chips cpu --ops`")


def _kernel_checks(port: Port, reference_only: tuple[str, ...], tell: Callable[[str], None]) -> tuple[KernelCheck, ...]:
    native = [(o.op, o.variant) for o in port.plan.ops if not {o.op, f"{o.op}/{o.variant}"} & set(reference_only)]
    tell(f"checking the kernels of {len(native)} Ops against their references; the first time, they are compiled ...")
    with emulating(port.chip):
        return check_kernels(default_registry(), port.chip, native, port.dtype)


def refuse_occupied(output: Path) -> None:
    """Raise PorterError for an output that exists and is not an empty directory."""
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise PorterError(f"{output}: already exists and is not empty; name another --output or remove it")
