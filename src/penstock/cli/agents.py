"""What each coding agent needs to use a service: environment, arguments, temporary files.  ``penstock launch`` runs it.

Nothing of an agent's own configuration is written; the names are those of the versions in docs/agents.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

MAX_OUTPUT_TOKENS = 32_000
"""The longest output that an agent is told to ask for; in short contexts a quarter of them."""

CLAUDE_SHORTEST_WINDOW = 100_000
"""Claude Code takes no smaller window for its compaction, but a smaller share of it."""

COMPACT_AT = 0.75
"""Share of the context at which an agent should begin to compact its conversation."""

KEY_VARIABLE = "PENSTOCK_API_KEY"
NO_KEY = "none"
"""Sent where the service needs no key: agents insist on one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentService:
    """The service that an agent shall use."""

    url: str  # without /v1
    model: str
    context: int | None  # tokens of prompt and output together; None: the service does not tell
    api_key: str | None

    @property
    def key(self) -> str:
        """The key, or what stands for none."""
        return self.api_key or NO_KEY

    @property
    def output_tokens(self) -> int | None:
        """The longest output to ask for."""
        return None if self.context is None else min(MAX_OUTPUT_TOKENS, self.context // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """How an agent is run."""

    words: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)  # set
    unset: Sequence[str] = ()  # variables that would lead the agent elsewhere
    files: Mapping[Path, str] = field(default_factory=dict)  # to be written before, in the temporary folder


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    """One agent that can be launched."""

    title: str
    executable: str
    install: str
    context: int  # tokens that its own prompt and some work need
    command: Callable[[AgentService, Path, Sequence[str]], AgentCommand]


def claude_command(service: AgentService, folder: Path, arguments: Sequence[str]) -> AgentCommand:
    """Claude Code.  Its settings file repeats the variables, as those of the user's own settings come before the
    environment's."""
    environ = {
        "ANTHROPIC_BASE_URL": service.url,
        "ANTHROPIC_AUTH_TOKEN": service.key,
        "ANTHROPIC_MODEL": service.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": service.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": service.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": service.model,
        "ANTHROPIC_DEFAULT_FABLE_MODEL": service.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": service.model,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line that changes each turn and breaks the prefix cache
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    }
    if service.context is not None:
        window = max(CLAUDE_SHORTEST_WINDOW, service.context)
        environ["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(service.output_tokens)
        environ["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
        environ["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(max(1, int(100 * COMPACT_AT * service.context / window)))
    settings = folder / "claude-settings.json"
    words = ["claude", "--settings", str(settings)]
    if not _has_flag(arguments, "--model"):
        words += ["--model", service.model]
    return AgentCommand(
        words=[*words, *arguments],
        environ=environ,
        unset=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"),
        files={settings: json.dumps({"env": environ}, indent=2)},
    )


def codex_command(service: AgentService, folder: Path, arguments: Sequence[str]) -> AgentCommand:
    """Codex: overrides of single settings, so that all others of the user's config.toml stay."""
    provider = (
        f'{{name="Penstock",base_url={json.dumps(service.url + "/v1")},env_key="{KEY_VARIABLE}",wire_api="responses"}}'
    )
    settings = {
        "model_provider": '"penstock"',
        "model_providers.penstock": provider,
        "model": json.dumps(service.model),
    }
    if service.context is not None:
        settings["model_context_window"] = str(service.context)
        settings["model_auto_compact_token_limit"] = str(int(COMPACT_AT * service.context))
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return AgentCommand(words=["codex", *flags, *arguments], environ={KEY_VARIABLE: service.key})


def opencode_command(service: AgentService, folder: Path, arguments: Sequence[str]) -> AgentCommand:
    """opencode: a configuration that it merges with the user's own, in a variable."""
    model: dict[str, object] = {"name": service.model, "tool_call": True}
    if service.context is not None:
        model["limit"] = {"context": service.context, "output": service.output_tokens}
    name = f"penstock/{service.model}"
    content = {
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "share": "disabled",
        "autoupdate": False,
        "provider": {
            "penstock": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Penstock",
                "options": {"baseURL": f"{service.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
                "models": {service.model: model},
            }
        },
    }
    environ = {"OPENCODE_CONFIG_CONTENT": json.dumps(content), KEY_VARIABLE: service.key}
    return AgentCommand(words=["opencode", *arguments], environ=environ)


def aider_command(service: AgentService, folder: Path, arguments: Sequence[str]) -> AgentCommand:
    """aider: the model's limits come from a file, as it knows no model by itself and would look for it elsewhere."""
    name = f"openai/{service.model}"
    words = ["aider", "--model", name, "--weak-model", name, "--no-check-update", "--no-show-model-warnings"]
    words += ["--no-analytics", "--no-show-release-notes"]
    environ = {
        "OPENAI_API_BASE": f"{service.url}/v1",
        "OPENAI_API_KEY": service.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    files = {}
    if service.context is not None:
        limits = {
            "max_tokens": service.output_tokens,
            "max_input_tokens": service.context,
            "max_output_tokens": service.output_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        metadata = folder / "aider-models.json"
        words += ["--model-metadata-file", str(metadata)]
        files[metadata] = json.dumps({name: limits}, indent=2)
    return AgentCommand(words=[*words, *arguments], environ=environ, files=files)


def _has_flag(arguments: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in arguments)


AGENTS: Mapping[str, CodingAgent] = MappingProxyType(
    {
        "claude": CodingAgent(
            title="Claude Code",
            executable="claude",
            install="npm install -g @anthropic-ai/claude-code",
            context=64_000,
            command=claude_command,
        ),
        "codex": CodingAgent(
            title="Codex",
            executable="codex",
            install="npm install -g @openai/codex",
            context=32_000,
            command=codex_command,
        ),
        "opencode": CodingAgent(
            title="opencode",
            executable="opencode",
            install="npm install -g opencode-ai",
            context=32_000,
            command=opencode_command,
        ),
        "aider": CodingAgent(
            title="aider",
            executable="aider",
            install="pip install aider-chat, in an environment of its own",
            context=16_000,
            command=aider_command,
        ),
    }
)
"""By the name that ``penstock launch`` takes."""
