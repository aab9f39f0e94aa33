"""``penstock plan``: would a model fit on these devices, how would it lie on them, and what is left for KV pages?"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.cli.paint import Paint, table
from penstock.errors import ConfigError
from penstock.launch.locate import config_folder
from penstock.parallel.devices import GIB, KNOWN, Devices, parse_devices
from penstock.parallel.plan import ModelSize, Plan, Share, make_plan
from penstock.weights.census import Coding, Form, coding, model_size
from penstock.weights.outline import Outline, read_outline

BAR_CELLS = 64
PARTS = (("weights", "blue"), ("activations", "yellow"), ("runtime", "magenta"), ("kv", "green"))
MOST_TIMES_MORE = 16

EPILOG = f"""\
examples:
  penstock plan ~/models/kimi-k2.5 --devices 8xH100
  penstock plan config.json --devices 2xH200 --weights lossless
  penstock plan meta-llama/Llama-3.1-8B --devices cpu:32GiB --json

Nothing is loaded: the answer comes from config.json alone.  Devices known by name: {", ".join(KNOWN)};
others by size: 2x48GiB.  The exit code is 0 if the model fits, 1 if not.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "plan",
        help="how a model would lie on given devices, before anything is loaded",
        description="Says from a model's config.json whether it fits on given devices, and what is left for KV pages.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, or org/name on the Hub")
    parser.add_argument("--devices", required=True, metavar="NxNAME", help="as 8xH100, 2x48GiB or cpu:64GiB")
    parser.add_argument(
        "--weights",
        choices=[form.value for form in Form],
        default=Form.STORED.value,
        help="what matrices are kept in (default: as they are stored)",
    )
    parser.add_argument("--max-model-len", type=int, metavar="T", help="tokens wanted (default: the model's positions)")
    parser.add_argument("--json", action="store_true", help="one JSON object, in bytes over all devices")


def run(args: argparse.Namespace) -> int:
    """0 if it fits, 1 if not; raises ConfigError, ModelError."""
    if args.max_model_len is not None and args.max_model_len < 1:
        raise ConfigError(f"--max-model-len must be at least 1, got {args.max_model_len}")
    devices = parse_devices(args.devices)
    outline = read_outline(config_folder(args.model))
    answer = plan_for(outline, devices, Form(args.weights), args.max_model_len)
    if args.json:
        print(msgspec.json.encode(as_json(answer)).decode())
    else:
        show(answer, Paint())
    return 0 if answer.plan.fits else 1


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that is said."""

    outline: Outline
    how: Coding
    size: ModelSize
    plan: Plan
    wanted: int  # tokens
    remedies: tuple[str, ...]


def plan_for(outline: Outline, devices: Devices, form: Form, wanted: int | None) -> Answer:
    """The plan, and what would help if the model does not fit or too few tokens do."""
    how = coding(form, outline.config, outline.layout)
    size = model_size(outline.spec, outline.layout, how)
    plan = make_plan(size, devices, wanted_tokens=wanted)
    tokens = wanted or size.max_positions
    return Answer(outline, how, size, plan, tokens, remedies(outline, devices, how, plan, tokens))


def remedies(outline: Outline, devices: Devices, how: Coding, plan: Plan, wanted: int) -> tuple[str, ...]:
    """Flags that would give room for ``wanted`` tokens, or for more than now; none when there is room."""
    if plan.kv_tokens >= wanted:
        return ()
    found = []
    for form in (Form.LOSSLESS, Form.FP8, Form.INT4):
        other = coding(form, outline.config, outline.layout)
        if other.bits < how.bits and (tokens := _tokens(outline, devices, other, wanted)) > plan.kv_tokens:
            kind = "the same answers" if form is Form.LOSSLESS else "other answers"
            found.append(f"--weights {form} ({tokens:,} tokens, {kind})")
    times = 2
    while times <= MOST_TIMES_MORE:
        more = Devices(devices.count * times, devices.name, devices.memory_bytes, devices.is_cpu)
        if not devices.is_cpu and (tokens := _tokens(outline, more, how, wanted)) >= wanted:
            found.append(f"--devices {more.count}x{more.name} ({tokens:,} tokens)")
            break
        times *= 2
    if plan.fits:
        found.append(f"--max-model-len {plan.kv_tokens} or less")
    return tuple(found)


def _tokens(outline: Outline, devices: Devices, how: Coding, wanted: int) -> int:
    return make_plan(model_size(outline.spec, outline.layout, how), devices, wanted_tokens=wanted).kv_tokens


# --- for programs ----------------------------------------------------------------------------------------------------


def as_json(answer: Answer) -> dict[str, Any]:
    """Bytes are totals over all devices."""
    plan = answer.plan
    return {
        "model": answer.outline.name,
        "architecture": answer.outline.spec.architecture,
        "parameters": answer.outline.layout.parameters,
        "weights": answer.how.name,
        "devices": {"count": plan.devices.count, "name": plan.devices.name, "memory_bytes": plan.devices.memory_bytes},
        "fits": plan.fits,
        "weight_bytes": plan.weight_bytes,
        "activation_bytes": plan.activation_bytes,
        "runtime_bytes": plan.runtime_bytes,
        "kv_bytes": plan.kv_bytes,
        "kv_tokens": plan.kv_tokens,
        "missing_bytes": plan.missing_bytes * plan.devices.count,
        "plan": {
            "tensor": plan.tensor,
            "pipeline": len(plan.stages),
            "stages": [
                {"layers": [share.layers.start, share.layers.stop], "weight_bytes": share.weights, "kv_bytes": share.kv}
                for share in plan.stages
            ],
        },
        "remedies": list(answer.remedies),
    }


# --- for people ------------------------------------------------------------------------------------------------------


def show(answer: Answer, paint: Paint) -> None:
    """The plan in words, the arithmetic, and a picture of each stage's memory."""
    plan, outline = answer.plan, answer.outline
    devices = plan.devices
    print(
        f"{paint(outline.name, 'bold')} ({outline.spec.architecture}, {outline.layout.parameters / 1e9:,.2f} billion "
        f"parameters) on {devices.count} x {devices.name}, {gib(devices.memory_bytes)} each"
    )
    print(f"tensor parallel over {plan.tensor}, {_stages(plan)}; weights in {answer.how.name}\n")
    print(f"{arithmetic(answer, paint)}\n")
    for share in plan.stages:
        print(f"stage {share.stage}, layers {share.layers.start}-{share.layers.stop - 1}, each device")
        print(picture(share, devices.memory_bytes, paint))
    print("   ".join(f"{paint('█', colour)} {name}" for name, colour in PARTS) + "\n")
    print(verdict(answer, paint))


def _stages(plan: Plan) -> str:
    return "one stage" if len(plan.stages) == 1 else f"{len(plan.stages)} pipeline stages"


def arithmetic(answer: Answer, paint: Paint) -> str:
    """Memory, less what is in it."""
    plan, size = answer.plan, answer.size
    count = plan.devices.count
    copies = plan.weight_bytes - size.weight_bytes
    a_token = sum(layer.cache.on_device(plan.tensor) for layer in size.layers) * plan.tensor
    growing = sum(la.cache.on_device(plan.tensor) for la in size.layers if la.cache.window is None) * plan.tensor
    note = f"{a_token / 1e3:,.1f} kB a token"
    if growing != a_token:
        windowed = sum(layer.cache.window is not None for layer in size.layers)
        note += f", {growing / 1e3:,.1f} once the windows of {windowed} layers are full"
    lines = (
        ("memory", gib(plan.devices.total_bytes), f"{count} x {gib(plan.devices.memory_bytes)}"),
        ("- weights", gib(plan.weight_bytes), f"{gib(size.weight_bytes)} once, {gib(copies)} of copies"),
        ("- activations", gib(plan.activation_bytes), "buffers of the largest step"),
        ("- runtime", gib(plan.runtime_bytes), "an allowance: context, kernels, recorded graphs"),
        ("= for KV pages", gib(plan.kv_bytes), ""),
        ("one sequence", f"{plan.kv_tokens:,} tokens" if plan.fits else "none", note),
    )
    return table([(name, value, paint(why, "dim")) for name, value, why in lines], right=(1,))


def picture(share: Share, memory: int, paint: Paint) -> str:
    """One line of cells, as long as the memory; what does not fit is red, beyond a mark."""
    used = share.weights + share.activations + share.runtime
    whole = max(memory, used)
    line, done, shown = "  ", 0, 0
    end = round(BAR_CELLS * memory / whole)
    for name, colour in PARTS:
        done += max(0, getattr(share, name))
        cells = round(BAR_CELLS * done / whole)
        line += paint("█" * (min(cells, end) - min(shown, end)), colour)
        if cells > end:
            line += paint(("|" if shown <= end else "") + "█" * (cells - max(shown, end)), "red")
        shown = cells
    rest = f"{gib(share.kv)} for KV" if share.kv >= 0 else f"{gib(-share.kv)} too much"
    return f"{line}  {paint(rest, 'bold')}"


def verdict(answer: Answer, paint: Paint) -> str:
    """Fits, fits with fewer tokens, or does not; with what would help."""
    plan = answer.plan
    if plan.kv_tokens >= answer.wanted:
        return paint(f"fits: {plan.kv_tokens:,} tokens, {answer.wanted:,} wanted", "green")
    head = "fits, but not with all its positions" if plan.fits else "does not fit"
    short = (
        f"{plan.kv_tokens:,} of {answer.wanted:,} tokens"
        if plan.fits
        else f"{gib(plan.missing_bytes)} too much on a device"
    )
    helps = "; ".join(answer.remedies) or "fewer bits a weight or more memory than was tried"
    return paint(f"{head}: {short}.  What would help: {helps}", "yellow" if plan.fits else "red")


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):,.1f} MiB"
