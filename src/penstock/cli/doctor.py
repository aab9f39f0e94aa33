"""``penstock doctor``: what this machine has, what would be used, what is missing, and how to mend it.

A probe takes milliseconds: nothing heavy is imported, nothing is written, no port is opened.  But where there is a GPU,
its driver is asked, once: a process of its own begins CUDA there, which takes a second, and memory while it lasts.  And
where a model is named that would be served on processors, products of its size are timed (``launch.speed_probe``).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bundled import storyteller
from penstock.cli.parsing import COMMANDS
from penstock.config.facts import GpuReport
from penstock.config.kv_memory import format_size
from penstock.config.load import load_serve
from penstock.engine.core.local_prefill import LOCAL_PREFILL_SHARE
from penstock.errors import KernelError, ModelError, PenstockError
from penstock.kernels.select import REFERENCE, available_families
from penstock.launch import event_loop
from penstock.launch.gpu_probe import gpu_report, package_version
from penstock.launch.machine import machine_facts
from penstock.launch.run_folder import RunFolder
from penstock.types import WorkerId

if TYPE_CHECKING:  # this command must run where packages are missing
    from penstock.config.resolve import ServePlan
    from penstock.launch.model_path import ModelLocation
    from penstock.weights.architecture.spec import ModelSpec

EPILOG = """\
examples:
  penstock doctor
  penstock doctor ~/models/llama            can this model be served here, how, and how fast?
  penstock doctor --json | jq .checks

Exit code 0 when this machine can serve, 1 when something that serving needs is missing.
"""

SHOWN_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_bf16")
"""Processor features that kernel families are chosen by, as /proc/cpuinfo names them."""

ENOUGH_FILES = 4096
"""Open files; every streaming client takes one in the gateway."""

ENOUGH_MEMORY = 512 << 20
"""Bytes for the processes of the bundled model; another model needs its weights on top."""


class CheckResult(StrEnum):
    """What a finding means for serving."""

    OK = "ok"
    NOTE = "note"  # serves, but slower or with less
    MISSING = "missing"  # cannot serve


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; ``mend`` says what to do unless all is well."""

    name: str
    verdict: CheckResult
    found: str
    mend: str = ""


MODEL_CHECK = "penstock serve"
"""The last check: what would be served."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "doctor",
        help=COMMANDS["doctor"],
        description="Say what this machine has, what would be used, what is missing and how to mend it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", nargs="?", metavar="FOLDER", help="a model's folder; none: the bundled storyteller")
    parser.add_argument("--json", action="store_true", help='print {"serves": ..., "checks": [...]}')


def run(args: argparse.Namespace) -> int:
    """0 when this machine can serve, else 1."""
    gpu = gpu_report()
    plan = plan_of(args.model, gpu)
    checks = [*examine(gpu), plan if isinstance(plan, Check) else check_plan(plan)]
    if args.model is not None and isinstance(plan, ModelPlan):
        checks += check_speed(args.model, plan)
    serves = all(check.verdict is not CheckResult.MISSING for check in checks)
    if args.json:
        print(json.dumps({"serves": serves, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        print(report(checks))
        print(f"\n{last_line(checks, args.model)}")
    return 0 if serves else 1


def last_line(checks: Sequence[Check], model: str | None) -> str:
    """What to type now."""
    missing = [check.name for check in checks if check.verdict is CheckResult.MISSING]
    if not missing:
        return f"ready to serve: penstock serve{f' {shlex.quote(model)}' if model else ''}"
    if missing == [MODEL_CHECK]:
        return "this machine can serve, but not this model: try penstock doctor FOLDER with another, or penstock doctor"
    return f"cannot serve: install or change what is missing ({', '.join(missing)}), then run penstock doctor again"


def report(checks: Iterable[Check]) -> str:
    """One line a check, and one more for what to do."""
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:8}{check.name:20}{check.found}")
        if check.mend:
            lines.append(f"{'':28}-> {check.mend}")
    return "\n".join(lines)


def examine(gpu: GpuReport, root: Path = Path("/")) -> list[Check]:
    """All checks, machine first.  ``gpu``: what was found when it was looked for."""
    return [
        check_system(),
        check_processor(root),
        check_memory(root),
        check_huge_pages(root),
        *check_facilities(),
        check_open_files(),
        *check_packages(),
        check_event_loop(),
        check_kernels(),
        check_bundled_model(),
        check_gpu(gpu),
    ]


# --- the machine ------------------------------------------------------------------------------------------------------


def check_system() -> Check:
    """Linux is required: memfd, pidfd and SO_PEERCRED have no stand-in elsewhere."""
    name = f"{platform.system()} {platform.release()}, {platform.machine()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        return Check(
            "system", CheckResult.MISSING, name, "Penstock runs on Linux; use a container or a virtual machine"
        )
    return Check("system", CheckResult.OK, name)


def check_processor(root: Path) -> Check:
    """Model, cores that may be used, and the features that matter to kernels."""
    facts = machine_facts((), root)
    lines = _colon_lines(root / "proc/cpuinfo")
    flags = set(lines.get("flags", "").split())
    features = " ".join(name for name in SHOWN_FEATURES if name in flags) or "no vector features that matter"
    numbers = f"family {lines.get('cpu family', '?')} model {lines.get('model', '?')}"
    found = f"{lines.get('model name', platform.machine())} ({numbers}), {facts.cores} cores, {features}"
    return Check("processor", CheckResult.OK, found)


def check_memory(root: Path) -> Check:
    """What can be had without swapping, within a container's limit."""
    free = machine_facts((), root).memory_bytes
    if free < ENOUGH_MEMORY:
        mend = (
            f"{format_size(ENOUGH_MEMORY)} suffice for the bundled model; end something, or raise the container's limit"
        )
        return Check("memory", CheckResult.NOTE, f"{format_size(free)} available", mend)
    return Check("memory", CheckResult.OK, f"{format_size(free)} available")


def check_huge_pages(root: Path) -> Check:
    """Weights are read at full memory bandwidth from 2 MiB pages only."""
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        mode = (root / path).read_text(encoding="ascii").split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return Check(
            "huge pages", CheckResult.NOTE, "unknown", "this kernel tells nothing about transparent huge pages"
        )
    if mode == "never":
        mend = f"as root: echo madvise > /{path}  (weights are read at about half the bandwidth without)"
        return Check("huge pages", CheckResult.NOTE, "never", mend)
    return Check("huge pages", CheckResult.OK, f"{mode}, for anonymous memory")


def _colon_lines(path: Path) -> dict[str, str]:
    """``name : value`` lines, the first of each name."""
    found: dict[str, str] = {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


# --- what processes need of the kernel --------------------------------------------------------------------------------


def check_facilities() -> list[Check]:
    """Each kernel facility that serving stands on, tried out."""
    probes: Mapping[str, tuple[Callable[[], None], str]] = {
        "memfd": (_try_memfd, "KV pages are shared through it: Linux 3.17 or newer, not forbidden by seccomp"),
        "pidfd": (_try_pidfd, "deaths are seen through it: Linux 5.3 or newer, not forbidden by seccomp"),
        "socket folder": (_try_socket_folder, "workers listen in it: XDG_RUNTIME_DIR or TMPDIR must be writable"),
        "seqpacket sockets": (_try_seqpacket, "supervisor and gateway talk over them"),
        "curve": (_try_curve, "pip install pyzmq from a wheel: its libzmq must be built with CURVE"),
    }
    return [_tried(name, probe, mend) for name, (probe, mend) in probes.items()]


def _tried(name: str, probe: Callable[[], None], mend: str) -> Check:
    try:
        probe()
    except Exception as error:  # noqa: BLE001 - whatever a probe raises is the finding
        return Check(name, CheckResult.MISSING, f"{type(error).__name__}: {error}", mend)
    return Check(name, CheckResult.OK, "works")


def _try_memfd() -> None:
    descriptor = os.memfd_create("penstock-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 4096)
    finally:
        os.close(descriptor)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_socket_folder() -> None:
    with closing(RunFolder()) as folder, socket.socket(socket.AF_UNIX) as probe:
        probe.bind(folder.endpoint(WorkerId("doctor"), 1).removeprefix("ipc://"))


def _try_seqpacket() -> None:
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        end.close()


def _try_curve() -> None:
    import zmq

    if not zmq.has("curve"):
        raise OSError(f"libzmq {zmq.zmq_version()} has no CURVE")


def check_open_files() -> Check:
    """The hard limit: the gateway raises its soft limit to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (at most {'unlimited' if hard == resource.RLIM_INFINITY else hard})"
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        return Check(
            "open files", CheckResult.NOTE, found, f"ulimit -n {ENOUGH_FILES}: every streaming client takes one"
        )
    return Check("open files", CheckResult.OK, found)


# --- what is installed ------------------------------------------------------------------------------------------------


def check_packages(distribution: str = "penstock") -> list[Check]:
    """The dependencies as the installed package declares them; nothing to say when it runs from its source tree."""
    try:
        declared = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return [Check("packages", CheckResult.OK, "running from a source tree")]
    wrong: list[str] = []
    for requirement in (line for line in declared if "extra ==" not in line):
        name, _, wanted = requirement.partition("==")
        try:
            have = importlib.metadata.version(name.strip())
        except importlib.metadata.PackageNotFoundError:
            return [Check("packages", CheckResult.MISSING, f"{name} is not installed", f"pip install '{requirement}'")]
        if have != wanted.strip():
            wrong.append(f"{name} {have} instead of {wanted}")
    if wrong:
        mend = "pip install penstock in an environment of its own: other versions are not tested"
        return [Check("packages", CheckResult.NOTE, "; ".join(wrong), mend)]
    return [Check("packages", CheckResult.OK, "all of the pinned versions")]


def check_event_loop() -> Check:
    """What gateways run on: the quicker one is an extra."""
    loop = event_loop.event_loop_name()
    if loop == "asyncio":
        return Check("event loop", CheckResult.OK, f"asyncio (quicker gateways: pip install '{event_loop.EXTRA}')")
    return Check("event loop", CheckResult.OK, f"{loop} {package_version(loop)}")


def check_bundled_model() -> Check:
    """Checks that the model that ``penstock serve`` serves without an argument is there."""
    folder = storyteller()
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        return Check("bundled model", CheckResult.NOTE, f"lacks {', '.join(missing)}", "install again, or name a model")
    return Check("bundled model", CheckResult.OK, f"{folder.name} (only tells stories)")


# --- accelerators -----------------------------------------------------------------------------------------------------


def check_gpu(report: GpuReport) -> Check:
    """The GPU that ``penstock serve`` finds, what is free on it, and what it lacks."""
    gpu = report.gpu
    if gpu is None:
        found = f"{report.reason}; the processor is used"
        return Check("gpu", CheckResult.NOTE if report.remedy else CheckResult.OK, found, report.remedy)
    major, minor = gpu.capability
    found = (
        f"{gpu.name} ({gpu.count} of them), compute capability {major}.{minor}, {format_size(gpu.free_bytes)} of "
        f"{format_size(gpu.total_bytes)} free; torch {package_version('torch')}, triton {package_version('triton')}"
    )
    return Check("gpu", CheckResult.OK, found)


# --- kernels ----------------------------------------------------------------------------------------------------------


def check_kernels(wanted: str | None = None) -> Check:
    """Families that this build and processor have, best first.  ``wanted``: ``PENSTOCK_KERNELS`` unless given."""
    wanted = os.environ.get("PENSTOCK_KERNELS", "auto") if wanted is None else wanted
    try:
        known = available_families()
        families = known if package_version("torch") else known[:-1]  # the last one needs torch
    except KernelError as error:
        mend = "pip install . compiles them (needs g++ 12 or newer); in a source tree ./run-tests does"
        return Check("kernels", CheckResult.MISSING, str(error), mend)
    if wanted not in ("auto", *families):
        found = f"PENSTOCK_KERNELS={wanted}, but there are {', '.join(families)}"
        return Check("kernels", CheckResult.MISSING, found, "unset the variable")
    used = families[0] if wanted == "auto" else wanted
    others = ", ".join(name for name in families if name != used)
    return Check("kernels", CheckResult.OK, f"{used} is used (there are also: {others or 'no others'})")


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What ``penstock serve`` would decide here and now, flags aside."""

    located: ModelLocation
    spec: ModelSpec
    plan: ServePlan


def plan_of(model: str | None = None, gpu: GpuReport | None = None) -> ModelPlan | Check:
    """The plan, or why there is none; asks no network.  ``gpu``: was found already."""
    try:
        from penstock.launch.compose import resolve_here
        from penstock.launch.model_path import locate_model
        from penstock.weights.inspect import inspect_model

        located = locate_model(model, download=_refuse_download)
        spec = inspect_model(located.path)
        return ModelPlan(located, spec, resolve_here(load_serve({}), located.name, spec, report=gpu))
    except ImportError as error:
        mend = "install the packages named above"
        return Check(MODEL_CHECK, CheckResult.MISSING, f"cannot be imported: {error}", mend)
    except ModelError as error:
        mend = "try penstock doctor ~/models/NAME" if not Path(model or "").is_dir() else ""
        return Check(MODEL_CHECK, CheckResult.MISSING, str(error), mend)
    except PenstockError as error:
        return Check(MODEL_CHECK, CheckResult.MISSING, str(error))


def check_plan(own: ModelPlan) -> Check:
    """The plan in words, and its notes."""
    plan = own.plan
    kv = format_size(plan.scheduler.pages * plan.page_bytes) + " of KV pages"
    kv += "" if plan.kv_dtype == plan.dtype else f" in {plan.kv_dtype}"
    kv += _room_for_copies(own.located.path, plan)
    where = "the processor" if plan.device == "cpu" else "a GPU"
    found = (
        f"would serve {own.located.name} ({own.spec.parameters / 1e6:,.1f} M parameters, context "
        f"{plan.scheduler.max_model_len}) on {where} with "
        f"{', '.join(worker.worker for worker in plan.workers)}; "
        f"each: kernels {plan.family} in {plan.dtype}, {_threads(plan.workers[0].threads)}, {kv}, "
        f"handed over by {plan.connector}"
    )
    return Check(MODEL_CHECK, CheckResult.NOTE if plan.notes else CheckResult.OK, found, "; ".join(plan.notes))


def _room_for_copies(path: Path, plan: ServePlan) -> str:
    """What decoded copies of the model's compressed weights may take; empty: there are none."""
    from penstock.weights.inspect import has_compressed_weights

    copies = plan.decoded_weights
    if copies is None or not has_compressed_weights(path):
        return ""
    return f", at most {format_size(copies.nbytes)} of decoded copies of weights for all workers"


# --- how fast ---------------------------------------------------------------------------------------------------------

MIN_GAIN = 1.05
"""By which compressed weights must be faster to be recommended."""


def check_speed(model: str, own: ModelPlan) -> list[Check]:
    """Steps of this model on this processor, measured, and what follows for how to serve it.  None for a GPU, and for
    quantized weights, whose products are others."""
    from penstock.launch.machine import usable_cores
    from penstock.launch.speed_probe import probe_speed
    from penstock.parallel.shard import token_numbers
    from penstock.weights.inspect import has_quantized_weights

    spec, plan = own.spec, own.plan
    if plan.device != "cpu" or plan.family == REFERENCE or has_quantized_weights(own.located.path, spec):
        return []
    cores = usable_cores(tuple(os.sched_getaffinity(0)))
    speed = probe_speed(plan.family, plan.dtype, cores, token_numbers(spec))
    found = (
        f"about {1e3 * speed.decode_s:.3g} ms a decode step of one response, {speed.prefill_tokens_s:.3g} tokens of "
        f"prompts a second, with {_threads(cores)} and weights in {plan.dtype}"
    )
    return [
        Check("speed", CheckResult.OK, found),
        Check("phases", CheckResult.OK, phases_advice(speed.decode_s, plan.scheduler.step_budget_ms / 1000)),
        Check("compression", CheckResult.OK, compression_advice(speed.compressed, plan.family, model)),
    ]


def phases_advice(decode_s: float, budget_s: float) -> str:
    """Whether to split prefill and decode on the cores of one host; ``budget_s``: the longest step with a chunk."""
    if decode_s >= LOCAL_PREFILL_SHARE * budget_s:
        return (
            "decode workers will prefill, too: on shared cores a prefill worker would spare responses nothing "
            "(docs/routing.md); --aggregated is as fast, with all KV memory in one worker"
        )
    return (
        f"split (the default): gaps between tokens stay near {1e3 * decode_s:.2g} ms while long prompts are computed; "
        f"--aggregated: first tokens sooner, gaps up to {1e3 * budget_s:.3g} ms"
    )


def compression_advice(gains: Mapping[int, float], family: str, model: str) -> str:
    """Whether to compress the weights; ``gains``: rows of a step -> how many times as fast it is."""
    if not gains:
        return f"saves disk, not time: {family} unpacks compressed weights when they are loaded"
    times = ", ".join(f"{gain:.2f} with {rows}" for rows, gain in gains.items())
    said = f"steps from compressed weights are so many times as fast, by tokens in a step: {times}"
    if gains[1] < MIN_GAIN:
        return f"{said}; serve it as it is"
    command = f"penstock compress {shlex.quote(model)} OUT"
    if min(gains.values()) >= 1 / MIN_GAIN:
        return f"{said}; {command}"
    return f"{said}; for single responses, or with memory for decoded copies: {command}"


def _refuse_download(model: str) -> str:
    raise ModelError(f"{model}: a name on the Hub; only a folder can be examined without fetching it")


def _threads(count: int) -> str:
    return f"{count} thread" + ("s" if count != 1 else "")
