"""`porter doctor`: what this machine has, and what stands in the way of porting or running on it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from porter.chips.catalogue import Catalogue, Chip, load_catalogue
from porter.chips.detect import Machine, detect
from porter.cli.output import JsonOption, emit, say
from porter.kernels.cpu.build import BuildError, find_compiler

LIBRARIES = ("porter", "torch", "transformers", "safetensors")

SLOWER = "CPU ports run on the reference Ops, correct but slower"


def doctor(json_output: JsonOption = False) -> None:
    """Show what this machine has: chip, torch, devices, vendor packages, compiler.

    Exit status 1 when something stops porter from running here.

    Example: porter doctor
    """
    machine = detect()
    torch_state, problem = probe_torch(load_catalogue())
    problems = [problem] if problem else []
    if machine.chip is None:
        problems.append(f"no chip in the catalogue for this processor ({machine.processor}): --target cpu is refused")
    compiler, trouble = probe_compiler()
    result = {
        "schema": "porter.doctor/1",
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "machine": as_json(machine),
        "compiler": compiler,
        "torch": torch_state,
        "problems": problems,
        "notes": [f"{trouble}: {SLOWER}"] if trouble else [],
    }
    emit(result, json_output, lambda console: print_report(console, result))
    if problems:
        for each in problems:
            say(f"porter: {each}")
        raise typer.Exit(1)


def as_json(machine: Machine) -> dict[str, Any]:
    """The machine as the JSON object that --json prints."""
    return {
        "chip": machine.chip,
        "processor": machine.processor,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "packages": dict(machine.packages),
    }


def probe_compiler() -> tuple[dict[str, str] | None, str | None]:
    """The C++ compiler that the CPU kernels are built with, as command and version, or None and why there is none."""
    try:
        command = find_compiler()
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except BuildError as error:
        return None, str(error)
    except (OSError, subprocess.CalledProcessError) as error:
        return None, f"the C++ compiler does not run ({error})"
    return {"command": " ".join(command), "version": done.stdout.partition("\n")[0]}, None


def probe_torch(catalogue: Catalogue) -> tuple[dict[str, Any] | None, str | None]:
    """What torch sees (threads, instruction set, accelerators), or None and the reason why it does not import."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        hint = "reinstall torch; if a vendor package fails to load itself, set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return None, f"torch does not import ({type(error).__name__}: {error}); {hint}"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = []
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        for index in range(torch.accelerator.device_count()):
            name = str(module.get_device_name(index))
            chip = chip_of(catalogue, accelerator.type, name)
            devices.append({"device": f"{accelerator.type}:{index}", "name": name, "chip": chip})
    state = {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "devices": devices,
    }
    return state, None


def chip_of(catalogue: Catalogue, device: str, device_name: str) -> str | None:
    """The one chip of torch device type `device` of which an alias with a number is in the driver's name, or None."""
    words = re.sub("[^a-z0-9]+", " ", device_name.lower())
    found = [chip.name for chip in catalogue if chip.device == device and _is_named(chip, words)]
    return found[0] if len(found) == 1 else None


def _is_named(chip: Chip, words: str) -> bool:
    numbered = (alias for alias in chip.aliases if re.search("[0-9]", alias))
    return any(re.search(rf"\b{alias.replace('-', ' ?')}", words) for alias in numbered)


def print_report(console: Console, result: dict[str, Any]) -> None:
    """The report for people: one line a fact."""
    machine, torch_state = result["machine"], result["torch"]
    memory, compiler = machine["memory_bytes"], result["compiler"]
    lines = [
        ("system", f"{result['system']}, Python {result['python']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        ("CPU", f"{machine['processor']}, {machine['cores']} cores, {_gib(memory)}"),
        ("chip 'cpu'", machine["chip"] or "none in the catalogue"),
        ("compiler", f"{compiler['command']}: {compiler['version']}" if compiler else "none"),
    ]
    if torch_state is None:
        lines.append(("torch", "does not import"))
    else:
        lines.append(("torch", f"{torch_state['threads']} threads, {torch_state['cpu_capability']}"))
        for each in torch_state["devices"]:
            lines.append((each["device"], f"{each['name']}: chip {each['chip'] or 'not in the catalogue'}"))
        if not torch_state["devices"]:
            lines.append(("accelerators", "none that torch can use"))
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines.append(("vendor packages", packages or "none"))
    lines += [("note", note) for note in result["notes"]]
    table = Table(box=None, show_header=False, pad_edge=False)
    for label, text in lines:
        table.add_row(label, text)
    console.print(table, markup=False)


def _gib(size: int | None) -> str:
    return f"{size / 2**30:.1f} GiB" if size is not None else "memory unknown"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
