"""The README of an exported directory."""

from __future__ import annotations

import transformers

from porter.adaptation import Port
from porter.plan import OpPlan
from porter.vendor_calls import vendor_calls


def calls_of(port: Port, op: OpPlan) -> dict[str, list[str]]:
    """The vendor's operators that an Op becomes, for chips of a vendor with a catalogue of them."""
    return {} if port.chip.device != "npu" else {"calls": list(vendor_calls(op.op, op.variant, port.chip.name))}


def readme_of(port: Port) -> str:
    """The lines that run the port, what it needs, and what serves each Op."""
    device = port.chip.device
    vendor, place = ("", "") if device == "cpu" else (f"import {port.chip.extension}\n", f'.to("{device}")')
    return f"""# {port.reference.name}, ported to {port.chip.name}

```python
{vendor}from transformers import AutoTokenizer, {port.family.auto_class}
model = {port.family.auto_class}.from_pretrained(".", trust_remote_code=True, dtype="auto"){place}
inputs = AutoTokenizer.from_pretrained(".")("Once upon", return_tensors="pt").input_ids{place}
print(model.generate(inputs, max_new_tokens=32))
```

Needs torch, transformers {transformers.__version__.rsplit(".", 1)[0]} and safetensors; porter is not needed.
{_kernels_say(port)}
Scheme: {port.scheme}, computing in {str(port.dtype).removeprefix("torch.")}.
`upstream.diff` shows what differs from transformers' own file, `port.json` which Op runs on which provider with what
evidence.
"""


def _kernels_say(port: Port) -> str:
    if port.chip.device == "cpu":
        return (
            "The kernels are compiled at first use by the C++ compiler of the machine; without one the reference Ops\n"
            "in plain torch run instead, and say so."
        )
    rows = [(op, ", ".join(calls_of(port, op).get("calls", [])) or "torch's own operators") for op in port.plan.ops]
    table = "\n".join(f"| {op.op}/{op.variant} | {calls} | {op.evidence} |" for op, calls in rows)
    vendor, (provider, *_) = port.chip.extension, port.chip.native_providers
    return f"""Also needs {vendor}. The modelling file calls Ops, which `porter_kernels_{provider}_*.py` make calls of
{vendor}; calls that its documents do not allow go to the reference in plain torch, and are counted. `porter.load` also
casts the weights under `formats` of port.json to the chip's blocks; without porter they are read as plain ones. None of
this was run on the chip: the evidence says how far it was checked.

| Op | {vendor} | evidence |
|---|---|---|
{table}
"""
