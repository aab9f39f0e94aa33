"""``penstock plan``: computes whether a model fits on devices, how it is laid out, and what is left for KV pages."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.bundled import STORYTELLER, storyteller
from penstock.cli.console import TextStyle, text_table
from penstock.cli.parsing import COMMANDS
from penstock.config.auto_mesh import ReadWeights, WorkerCores
from penstock.config.auto_mesh import token_s as cpu_token_s
from penstock.config.base import expanded_path
from penstock.config.device import TRITON
from penstock.config.facts import ExtraWeights
from penstock.config.load import lora_folders, parse_setting
from penstock.config.mesh import Mesh
from penstock.config.resolve import resolve_kv_dtype
from penstock.config.schema import EngineSettings
from penstock.errors import ConfigError
from penstock.launch.draft_model import adapter_weights, draft_head_weights, draft_kind, draft_model_weights
from penstock.launch.gpu_probe import gpu_report
from penstock.launch.machine import free_memory, machine_facts
from penstock.launch.model_path import config_folder
from penstock.parallel.plan import (
    DEVICE_MEMORY_GIB,
    GIB,
    Devices,
    ModelSize,
    ParallelPlan,
    StageShare,
    all_plans,
    make_plan,
    parse_devices,
    rank_weights,
    requests_at_once,
    why_not_servable,
    workers_of,
)
from penstock.parallel.shard import possible_meshes, stage_layers, token_numbers
from penstock.parallel.sizes import BF16, WeightEncoding, WeightFormat, model_size, weight_bytes, weight_encoding
from penstock.sim.roofline import token_s
from penstock.types import FP8_E4M3, Role
from penstock.weights.architecture.decoder import DecoderConfig
from penstock.weights.eagle import FOLDER, inspect_draft_head
from penstock.weights.inspect import CONFIG_FILE, ModelOutline, read_outline
from penstock.weights.lora import LoraFileLimits, layout_lora_targets, read_lora_adapter

BAR_CELLS = 64
PARTS = (("weights", "blue"), ("activations", "yellow"), ("runtime", "magenta"), ("extra", "cyan"), ("kv", "green"))
"""Parts of a device's memory in the order of the bar; without colors a part is drawn by its first letter."""
MOST_TIMES_MORE = 16

EPILOG = f"""\
examples:
  penstock plan ~/models/llama                             here, with what is free now
  penstock plan ~/models/kimi-k2.5 --devices 8xH100
  penstock plan config.json --devices 2xH200 --weights lossless
  penstock plan meta-llama/Llama-3.1-8B --devices cpu:32GiB --json
  penstock plan ~/models/llama --devices 1xH100 --kv-dtype fp8_e4m3
  penstock plan ~/models/llama --devices cpu:32GiB --speculate head --lora sql=~/adapters/sql

Nothing is loaded: config.json, or a GGUF file's header, is enough.
Devices known by name: {", ".join(DEVICE_MEMORY_GIB)};
others by size: 2x48GiB; cpu: this host's memory.  The exit code is 0 if the model fits, 1 if not; the last line says
whether `penstock serve` can use such devices today.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "plan",
        help=COMMANDS["plan"],
        description="Computes from a model's config.json whether it fits on devices, and what is left for KV pages.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder, a GGUF file, a config.json, or org/name on the Hub; none: the bundled storyteller",
    )
    parser.add_argument(
        "--devices",
        metavar="NxNAME",
        help="as 8xH100, 2x48GiB, cpu or cpu:64GiB (default: this host's GPU or processors, with what is free now)",
    )
    parser.add_argument(
        "--weights",
        choices=[form.value for form in WeightFormat],
        default=WeightFormat.STORED.value,
        help="what matrices are kept in (default: as they are stored)",
    )
    parser.add_argument(
        "--kv-dtype", metavar="auto|fp8_e4m3", default="auto", help="what KV pages are in (default: auto, bf16)"
    )
    parser.add_argument("--max-model-len", type=int, metavar="T", help="tokens wanted (default: the model's positions)")
    parser.add_argument("--json", action="store_true", help="one JSON object, in bytes over all devices")
    group = parser.add_argument_group("what is loaded with it, as for `penstock serve`")
    group.add_argument("--speculate", metavar="off|auto|lookup|head|draft", default="off", help="default: off")
    group.add_argument("--draft-model", metavar="DIR", help="the head or the small model that guesses")
    group.add_argument("--lora", metavar="NAME=DIR", action="append", default=[], help="a LoRA adapter (repeatable)")
    group.add_argument("--allow-lora-updating", action="store_true", help="count all of --lora-memory")
    group.add_argument("--lora-memory", metavar="SIZE", default="1GiB", help="of adapters in a worker (default: 1GiB)")


def run(args: argparse.Namespace) -> int:
    """0 if it fits, 1 if not; raises ConfigError, ModelError."""
    if args.max_model_len is not None and args.max_model_len < 1:
        raise ConfigError(f"--max-model-len must be at least 1, got {args.max_model_len}")
    devices = planned_devices(args.devices)
    folder = storyteller() if args.model in (None, STORYTELLER) else config_folder(args.model)
    outline = read_outline(folder)
    if keeps_no_kv(outline):
        return plan_without_kv(outline, devices, WeightFormat(args.weights), as_json=args.json)
    kept = planned_kv_dtype(parse_setting(EngineSettings, "kv_dtype", args.kv_dtype, "--kv-dtype"), devices, outline)
    extra = planned_extra_weights(args, folder, outline)
    answer = plan_for(outline, devices, WeightFormat(args.weights), args.max_model_len, extra, kept=kept)
    answer = replace(answer, command=serve_command(args, answer))
    if args.json:
        print(msgspec.json.encode(plan_as_json(answer)).decode())
    else:
        print_plan(answer, TextStyle())
    return 0 if answer.plan.fits else 1


def planned_devices(asked: str | None) -> Devices:
    """The devices of ``--devices``; ``cpu`` alone is this host's memory.  Raises ConfigError."""
    if asked is None:
        return devices_here()
    if asked.strip().lower() == "cpu":
        return cpu_here()
    return parse_devices(asked)


def cpu_here() -> Devices:
    """This host's processors, with the memory that is free now."""
    return Devices(count=1, name="cpu", memory_bytes=free_memory(), is_cpu=True)


def devices_here() -> Devices:
    """What ``penstock serve`` would find: one GPU with what its driver says is free, or the host's memory."""
    gpu = gpu_report().gpu
    if gpu is not None:
        return Devices(count=1, name=gpu.name, memory_bytes=gpu.free_bytes, is_cpu=False)
    return cpu_here()


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One way to divide a model."""

    name: str  # as ``--parallel`` takes it
    weights: int  # bytes of a device's or rank's part, the largest
    plan: ParallelPlan  # what is left for KV pages
    seconds: float | None  # predicted, of a lone request's token; None: nothing is known of the devices
    chosen: bool
    command: str = ""  # that serves the model in this way; empty: none does


@dataclass(frozen=True, slots=True)
class PlanResult:
    """What is printed."""

    outline: ModelOutline
    how: WeightEncoding
    size: ModelSize
    plan: ParallelPlan
    wanted: int  # tokens
    kept: str  # what KV pages are in
    remedies: tuple[str, ...]
    command: str = ""  # that would serve it; empty: none can

    @property
    def ladder(self) -> list[PlanRow]:
        """Every way to divide the model over the devices, or over ranks on the host's processors."""
        if self.plan.devices.is_cpu:
            return rank_rows(self)
        spec, size = self.outline.spec, self.size
        return [
            PlanRow(
                name=plan.mesh.name,
                weights=max(share.weights for share in plan.stages),
                plan=plan,
                seconds=token_s(spec, size, plan),
                chosen=plan.tensor == self.plan.tensor,
                command=self.command if plan.tensor == self.plan.tensor else "",
            )
            for plan in all_plans(size, self.plan.devices)
        ]

    @property
    def request_tokens(self) -> int:
        """Tokens of the longest request: the requested length, or what fits."""
        return min(self.wanted, self.plan.kv_tokens)

    @property
    def requests(self) -> int:
        """Requests of that length that fit at the same time."""
        return requests_at_once(self.size, self.plan, self.request_tokens) if self.plan.fits else 0

    @property
    def why_not_servable(self) -> str:
        return why_not_servable(self.plan.devices)


def serve_command(args: argparse.Namespace, answer: PlanResult) -> str:
    """The command that serves what was planned, or nothing where none does."""
    plan = answer.plan
    if not plan.fits or answer.why_not_servable or args.weights not in (WeightFormat.STORED, WeightFormat.LOSSLESS):
        return ""
    folder = model_argument(args.model)
    model = shlex.quote(folder) if folder else ""
    words = ["penstock serve", model, f"--device {'cpu' if plan.devices.is_cpu else 'cuda'}"]
    if args.max_model_len is not None or plan.kv_tokens < answer.wanted:
        words.append(f"--max-model-len {answer.request_tokens}")
    if args.kv_dtype != "auto":
        words.append(f"--kv-dtype {args.kv_dtype}")
    if args.speculate != "off":
        words.append(f"--speculate {args.speculate}")
    if args.draft_model:
        words.append(f"--draft-model {shlex.quote(args.draft_model)}")
    words += [f"--lora {shlex.quote(each)}" for each in args.lora]
    command = " ".join(word for word in words if word)
    if args.weights == WeightFormat.LOSSLESS and model:
        written = shlex.quote(f"{Path(folder).name}-compressed")
        command = f"penstock compress {model} {written} && {command.replace(model, written, 1)}"
    return command


def rank_rows(answer: PlanResult) -> list[PlanRow]:
    """One process and the plans of ranks that have a core each on this host, whose memory all ranks share.

    What is loaded with the model is not divided yet, nor are codes.
    """
    spec, size, machine = answer.outline.spec, answer.size, machine_facts(())
    nodes = len({core.numa_node for core in machine.physical_cores})
    rows = []
    alone = bool(size.extra_weights or answer.outline.coded_bits) or spec.quantization is not None
    for mesh in (Mesh(),) if alone else possible_meshes(spec, machine.cores):
        stages = stage_layers(spec, mesh.pipeline) if mesh.ranks > 1 else (range(spec.layers),)
        largest = rank_weights(size, mesh, stages)
        read = ReadWeights(token_numbers(spec), answer.how.bits / 8, spec.layers, spec.hidden)
        seconds = cpu_token_s(read, Role.DECODE, WorkerCores(machine.cores, nodes), mesh)
        command = answer.command
        if command and mesh.ranks > 1:
            command += f" --aggregated --parallel {mesh.name}"  # one worker, so that each rank has a core
        rows.append(PlanRow(mesh.name, largest, answer.plan, seconds, mesh.ranks == 1, command))
    return rows


def model_argument(model: str | None) -> str:
    """As ``penstock serve`` takes it: a folder instead of its config.json, nothing for the bundled model."""
    if model is None or model == STORYTELLER:
        return ""
    path = Path(model)
    return str(path.parent) if path.name == CONFIG_FILE and path.is_file() else model


def keeps_no_kv(outline: ModelOutline) -> bool:
    """An encoder: it reads a text in one step and keeps nothing of it."""
    return not isinstance(outline.spec.details, DecoderConfig) and not outline.spec.audio_tokens


def plan_without_kv(outline: ModelOutline, devices: Devices, form: WeightFormat, *, as_json: bool) -> int:
    """Print the plan of an encoder; 0 if it fits, 1 if not."""
    how = weight_encoding(form, outline)
    nbytes = weight_bytes(outline.layout, how)
    fits = nbytes < devices.memory_bytes
    if as_json:
        found = {
            "model": outline.name,
            "architecture": outline.spec.architecture,
            "parameters": outline.layout.parameters,
            "weights": how.name,
            "devices": {"count": devices.count, "name": devices.name, "memory_bytes": devices.memory_bytes},
            "fits": fits,
            "weight_bytes": nbytes,
            "kv_bytes": 0,
            "kv_tokens": 0,
            **servability(devices),
        }
        print(msgspec.json.encode(found).decode())
        return 0 if fits else 1
    paint = TextStyle()
    verb = "fits" if fits else "does not fit"
    print(
        paint(
            f"{verb}: {outline.layout.parameters / 1e6:,.1f} M parameters, {gib(nbytes)} of {how.name} weights on "
            f"{devices.name} with {gib(devices.memory_bytes)}; {outline.spec.architecture} keeps no KV pages",
            "green" if fits else "red",
        )
    )
    return 0 if fits else 1


def servability(devices: Devices) -> dict[str, Any]:
    """Whether ``penstock serve`` can use such devices today, for programs."""
    reason = why_not_servable(devices)
    return {"servable": not reason, "why_not_servable": reason}


def planned_kv_dtype(asked: str, devices: Devices, outline: ModelOutline) -> str:
    """What pages are in, as ``penstock serve`` decides it.  Raises ConfigError."""
    recurrent = outline.name if outline.spec.kv.states is not None else ""
    return resolve_kv_dtype(asked, BF16.name, "C++" if devices.is_cpu else TRITON, recurrent=recurrent)


def plan_for(
    outline: ModelOutline,
    devices: Devices,
    form: WeightFormat,
    wanted: int | None,
    extra: tuple[ExtraWeights, ...] = (),
    *,
    kept: str = BF16.name,
) -> PlanResult:
    """The plan, and what would help if the model does not fit or too few tokens do.  ``kept``: what pages are in."""
    how = weight_encoding(form, outline)
    size = replace(model_size(outline.spec, outline.layout, how, kept), extra_weights=extra)
    plan = make_plan(size, devices, wanted_tokens=wanted)
    tokens = wanted or size.max_positions
    return PlanResult(outline, how, size, plan, tokens, kept, remedies((outline, how, kept), size, plan, tokens))


def remedies(
    model: tuple[ModelOutline, WeightEncoding, str], size: ModelSize, plan: ParallelPlan, wanted: int
) -> tuple[str, ...]:
    """Flags that would give room for ``wanted`` tokens, or for more than now; none when there is room."""
    if plan.kv_tokens >= wanted:
        return ()
    (outline, how, kept), found, devices = model, [], plan.devices
    for form in (WeightFormat.LOSSLESS, WeightFormat.FP8, WeightFormat.INT4):
        other = weight_encoding(form, outline)
        if other.bits >= how.bits:
            continue
        smaller = replace(model_size(outline.spec, outline.layout, other, kept), extra_weights=size.extra_weights)
        if (tokens := make_plan(smaller, devices, wanted_tokens=wanted).kv_tokens) > plan.kv_tokens:
            kind = "the same answers" if form is WeightFormat.LOSSLESS else "other answers, of such a checkpoint"
            found.append(f"--weights {form} ({tokens:,} tokens, {kind})")
    if kept == BF16.name and not devices.is_cpu and outline.spec.kv.states is None:
        smaller = replace(model_size(outline.spec, outline.layout, how, FP8_E4M3), extra_weights=size.extra_weights)
        if (tokens := make_plan(smaller, devices, wanted_tokens=wanted).kv_tokens) > plan.kv_tokens:
            found.append(f"--kv-dtype {FP8_E4M3} ({tokens:,} tokens, other answers)")
    times = 2
    while times <= MOST_TIMES_MORE:
        more = Devices(devices.count * times, devices.name, devices.memory_bytes, devices.is_cpu)
        if not devices.is_cpu and (tokens := make_plan(size, more, wanted_tokens=wanted).kv_tokens) >= wanted:
            only = ", a plan only" if why_not_servable(more) else ""
            found.append(f"--devices {more.count}x{more.name} ({tokens:,} tokens{only})")
            break
        times *= 2
    if plan.fits:
        found.append(f"--max-model-len {plan.kv_tokens} or less")
    return tuple(found)


def planned_extra_weights(args: argparse.Namespace, folder: Path, outline: ModelOutline) -> tuple[ExtraWeights, ...]:
    """Weights that the flags add to the model, from configurations and headers.  Raises ConfigError, ModelError."""
    named = args.draft_model
    asked = parse_setting(EngineSettings, "speculate", args.speculate, "--speculate")
    kind = draft_kind(asked, named, folder, outline.spec)
    found: list[ExtraWeights] = []
    if kind == "draft":
        found.append(draft_model_weights(read_outline(config_folder(named)).spec))
    elif kind == "head":
        head = folder / FOLDER if named is None else expanded_path(named, "--draft-model")
        found.append(draft_head_weights(inspect_draft_head(head, outline.spec)))
    room = parse_setting(EngineSettings, "lora_memory", args.lora_memory, "--lora-memory")
    limits = LoraFileLimits(max_rank=EngineSettings().max_lora_rank, max_bytes=room)
    targets = layout_lora_targets(outline.layout)
    adapters = [read_lora_adapter(path, targets, limits).nbytes for path in lora_folders(args.lora).values()]
    return (*found, *adapter_weights(adapters, room if args.allow_lora_updating else None))


# --- for programs ----------------------------------------------------------------------------------------------------


def plan_as_json(answer: PlanResult) -> dict[str, Any]:
    """Bytes are totals over all devices."""
    plan = answer.plan
    return {
        "model": answer.outline.name,
        "architecture": answer.outline.spec.architecture,
        "parameters": answer.outline.layout.parameters,
        "weights": answer.how.name,
        "kv_dtype": answer.kept,
        "devices": {"count": plan.devices.count, "name": plan.devices.name, "memory_bytes": plan.devices.memory_bytes},
        "fits": plan.fits,
        "weight_bytes": plan.weight_bytes,
        "activation_bytes": plan.activation_bytes,
        "runtime_bytes": plan.runtime_bytes,
        "beside_bytes": plan.extra_bytes,
        "beside": [
            {"name": own.name, "bytes": own.bytes(workers_of(plan.devices)) * plan.devices.count}
            for own in answer.size.extra_weights
        ],
        "kv_bytes": plan.kv_bytes,
        "kv_tokens": plan.kv_tokens,
        "request_tokens": answer.request_tokens,
        "requests_at_once": answer.requests,
        "missing_bytes": plan.missing_bytes * plan.devices.count,
        "plan": {
            "tensor": plan.tensor,
            "pipeline": len(plan.stages),
            "stages": [
                {"layers": [share.layers.start, share.layers.stop], "weight_bytes": share.weights, "kv_bytes": share.kv}
                for share in plan.stages
            ],
        },
        "plans": [
            {
                "plan": row.name,
                "weight_bytes": row.weights,
                "kv_tokens": row.plan.kv_tokens,
                "token_ms": None if row.seconds is None else round(row.seconds * 1e3, 3),
                "command": row.command,
            }
            for row in answer.ladder
        ],
        "remedies": list(answer.remedies),
        **servability(plan.devices),
        "command": answer.command,
    }


# --- for people ------------------------------------------------------------------------------------------------------


def print_plan(answer: PlanResult, paint: TextStyle) -> None:
    """The plan in words, the arithmetic, and a bar of each stage's memory."""
    plan, outline = answer.plan, answer.outline
    devices = plan.devices
    print(
        f"{paint(outline.name, 'bold')} ({outline.spec.architecture}, {outline.layout.parameters / 1e9:,.2f} billion "
        f"parameters) on {devices.count} x {devices.name}, {gib(devices.memory_bytes)} each"
    )
    forms = f"weights in {answer.how.name}, KV pages in {answer.kept}"
    print(f"tensor parallel over {plan.tensor}, {_stages(plan)}; {forms}\n")
    print(f"{arithmetic(answer, paint)}\n")
    ladder = answer.ladder
    if len(ladder) > 1:
        source = "defaults for its cores" if devices.is_cpu else "data sheets"
        print(f"plans, the chosen one with *; time of a lone request's token, computed from {source}:")
        print(f"{plans_table(ladder)}\n")
    for share in plan.stages:
        print(f"stage {share.stage}, layers {share.layers.start}-{share.layers.stop - 1}, each device")
        print(picture(share, devices.memory_bytes, paint))
    shown = [part for part in PARTS if part[0] != "extra" or plan.extra_bytes]
    print("   ".join(f"{cell(paint, name, color, 1)} {name}" for name, color in shown) + "\n")
    print(verdict(answer, paint))
    print(next_step(answer, paint))


def _stages(plan: ParallelPlan) -> str:
    return "one stage" if len(plan.stages) == 1 else f"{len(plan.stages)} pipeline stages"


def arithmetic(answer: PlanResult, paint: TextStyle) -> str:
    """Memory, less what is in it."""
    plan, size = answer.plan, answer.size
    count = plan.devices.count
    copies = plan.weight_bytes - size.weight_bytes
    a_token = sum(layer.cache.on_device(plan.tensor) for layer in size.layers) * plan.tensor
    growing = sum(la.cache.on_device(plan.tensor) for la in size.layers if la.cache.window is None) * plan.tensor
    note = f"{a_token / 1024:,.1f} KiB a token"
    if growing != a_token:
        windowed = sum(layer.cache.window is not None for layer in size.layers)
        note += f", {growing / 1024:,.1f} once the windows of {windowed} layers are full"
    fixed = sum(layer.cache.fixed_on_device(plan.tensor) for layer in size.layers) * plan.tensor
    if fixed:
        recurrent = sum(layer.cache.fixed > 0 for layer in size.layers)
        note += f", and {gib(fixed)} for the states of {recurrent} layers, however long it is"
    lines = (
        ("memory", gib(plan.devices.total_bytes), f"{count} x {gib(plan.devices.memory_bytes)}"),
        ("- weights", gib(plan.weight_bytes), f"{gib(size.weight_bytes)} once, {gib(copies)} of copies"),
        ("- activations", gib(plan.activation_bytes), "buffers of the largest step"),
        ("- runtime", gib(plan.runtime_bytes), "an allowance: context, kernels, recorded graphs"),
        *((f"- {own.name}", gib(own.bytes(workers_of(plan.devices)) * count), own.why) for own in size.extra_weights),
        ("= for KV pages", gib(plan.kv_bytes), ""),
        ("KV tokens", f"{plan.kv_tokens:,}" if plan.fits else "none", note),
    )
    return text_table([(name, value, paint(why, "dim")) for name, value, why in lines], right=(1,))


def plans_table(ladder: list[PlanRow]) -> str:
    """Every way to divide the model, and the command that serves it if there is one; the chosen one is marked."""
    rows = [["plan", "weights a rank", "KV tokens", "ms a token"]]
    for row in ladder:
        tokens = f"{row.plan.kv_tokens:,}" if row.plan.fits else f"{gib(row.plan.missing_bytes)} too much"
        time = "" if row.seconds is None else f"{row.seconds * 1e3:.2f}"
        rows.append([f"{row.name}{' *' if row.chosen else ''}", gib(row.weights), tokens, time])
    if any(row.command for row in ladder):
        for cells, command in zip(rows, ("served by", *(row.command for row in ladder)), strict=True):
            cells.append(command)
    return text_table(rows, right=(1, 2, 3))


def picture(share: StageShare, memory: int, paint: TextStyle) -> str:
    """One line of cells, as long as the memory; what does not fit is red, beyond a mark."""
    used = share.weights + share.activations + share.runtime + share.extra
    whole = max(memory, used)
    line, done, shown = "  ", 0, 0
    end = round(BAR_CELLS * memory / whole)
    for name, color in PARTS:
        done += max(0, getattr(share, name))
        cells = round(BAR_CELLS * done / whole)
        line += cell(paint, name, color, min(cells, end) - min(shown, end))
        if cells > end:
            line += paint("|" if shown <= end else "", "red") + cell(paint, name, "red", cells - max(shown, end))
        shown = cells
    rest = f"{gib(share.kv)} for KV" if share.kv >= 0 else f"{gib(-share.kv)} too much"
    return f"{line}  {paint(rest, 'bold')}"


def cell(paint: TextStyle, name: str, color: str, count: int) -> str:
    """``count`` cells of a bar: colored blocks, or, without colors, the part's first letter."""
    return paint("█" * count, color) if paint.colored else name[0] * count


def next_step(answer: PlanResult, paint: TextStyle) -> str:
    """What to type, or why `penstock serve` cannot do it today."""
    if reason := answer.why_not_servable:
        return paint(
            f"a plan only: `penstock serve` cannot use {answer.plan.devices.name} this way: {reason}", "yellow"
        )
    return f"serve it: {answer.command}" if answer.command else ""


def verdict(answer: PlanResult, paint: TextStyle) -> str:
    """Fits, fits with fewer tokens, or does not; with what would help."""
    plan = answer.plan
    if plan.kv_tokens >= answer.wanted:
        return paint(f"fits: {answer.requests:,} requests of {answer.request_tokens:,} tokens at once", "green")
    head = "fits, but not with all its positions" if plan.fits else "does not fit"
    short = (
        f"{plan.kv_tokens:,} of {answer.wanted:,} tokens"
        if plan.fits
        else f"{gib(plan.missing_bytes)} too much on a device"
    )
    helps = "; ".join(answer.remedies) or f"nothing of what was tried: {tried(answer)}"
    return paint(f"{head}: {short}.  What would help: {helps}", "yellow" if plan.fits else "red")


def tried(answer: PlanResult) -> str:
    """What ``remedies`` looked at."""
    forms = ", ".join(f"--weights {form}" for form in (WeightFormat.LOSSLESS, WeightFormat.FP8, WeightFormat.INT4))
    return forms if answer.plan.devices.is_cpu else f"{forms}, {MOST_TIMES_MORE} times the devices"


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):,.1f} MiB"
