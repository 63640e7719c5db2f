"""The coding clients: how each is started against lego, and what is known of it. docs/harnesses/ has the same in words.

A client has wires: the protocol that it speaks, `-whole` for replies that are not streamed. `rewrites` says why a
wire's history (or a wire's after a fault) is not a strict extension of what was sampled, and `reasons` what lego's
lineages say of it; without them the test demands that each turn extends the last. `breaks` is the same for the token-in
relay. `ends` says by which fault a client ends by its own design; without it the task must be done after all.
"""

import json

MODEL = "lego-test"
PROMPT = "Make the files made_by_turn1.txt and made_by_turn2.txt, one after the other, with the shell."


class Place:
    """Where a run happens."""

    def __init__(self, clients, folder, scripts, url, key):
        self.clients, self.folder, self.scripts = clients, folder, scripts
        self.home = folder / "home"
        # lego without and with /v1.
        self.root, self.v1 = url, f"{url}/v1"
        # Names the session, too: sk-lego-<session>.<secret>.
        self.key = key

    def write(self, path, value):
        """Writes a JSON file in the home folder."""
        path = self.home / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2))
        return path


class Client:
    """A client that install.sh installs into the folder of its name."""

    name = ""
    wires = ()
    is_in_ci = True
    # Whether it prints the model's last text.
    prints_answer = True
    why_rewritten = {}
    # The breaks of such a wire (or of it after a fault) through the live relay, by the names that lego's lineages have for their reasons.
    why_broke = {}
    why_ended = {}
    # Through the token-in relay: how many turns begin anew, and why; why a wire is asked in chat's words all the same.
    why_broken = {}
    why_in_chat = {}

    def path(self, place):
        """Folders before the system's in PATH."""
        folder = place.clients / self.name
        return [str(folder / "node_modules/.bin"), str(folder / "bin")]

    def command(self, wire, place):
        """Arguments and environment. The home and work folders are new."""
        raise NotImplementedError

    def rewrites(self, wire, fault):
        """Why the history is rewritten, if so, and whether only by this fault."""
        always = self.why_rewritten.get(wire)
        return always or self.why_rewritten.get((wire, fault)), not always

    def breaks(self, wire, fault):
        """How many turns begin anew through the token-in relay, why, and whether only by this fault."""
        always = self.why_broken.get(wire)
        return *(always or self.why_broken.get((wire, fault)) or (0, None)), not always

    def reasons(self, wire, fault, relay):
        """The breaks that lego's lineages tell of the task, each by its reason."""
        if relay == "token_in":
            return ["message_edited"] * self.breaks(wire, fault)[0]
        return self.why_broke.get((wire, fault)) or self.why_broke.get(wire, [])

    def ends(self, wire, fault):
        return self.why_ended.get((wire, fault))


class Pi(Client):
    name = "pi"
    wires = ("chat", "messages", "responses")
    apis = {"chat": "openai-completions", "messages": "anthropic-messages", "responses": "openai-responses"}

    def command(self, wire, place):
        model = {
            "id": MODEL,
            "name": MODEL,
            "reasoning": True,
            "input": ["text"],
            "contextWindow": 131072,
            "maxTokens": 8192,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        # Its Messages client adds /v1 itself.
        url = place.root if wire == "messages" else place.v1
        provider = {"baseUrl": url, "api": self.apis[wire], "apiKey": place.key, "models": [model]}
        place.write("pi/models.json", {"providers": {"lego": provider}})
        environment = {"PI_OFFLINE": "1", "PI_CODING_AGENT_DIR": str(place.home / "pi")}
        return ["pi", "-p", "--no-session", "--provider", "lego", "--model", MODEL, PROMPT], environment


class Codex(Client):
    name = "codex"
    wires = ("responses",)

    def command(self, wire, place):
        (place.home / ".codex").mkdir(parents=True)
        settings = {
            "analytics.enabled": "false",
            "check_for_update_on_startup": "false",
            "model_provider": "lego",
            "model_providers.lego.name": "lego",
            "model_providers.lego.base_url": place.v1,
            "model_providers.lego.env_key": "OPENAI_API_KEY",
            "model_providers.lego.wire_api": "responses",
        }
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL]
        for key, value in settings.items():
            flags += ["-c", f"{key}={value}"]
        environment = {"OPENAI_API_KEY": place.key, "CODEX_HOME": str(place.home / ".codex")}
        return ["codex", "exec", *flags, PROMPT], environment


class ClaudeCode(Client):
    name = "claude-code"
    wires = ("messages",)

    def command(self, wire, place):
        environment = {
            "ANTHROPIC_BASE_URL": place.root,
            "ANTHROPIC_AUTH_TOKEN": place.key,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # It refuses --dangerously-skip-permissions as root otherwise.
            "IS_SANDBOX": "1",
        }
        return ["claude", "-p", PROMPT, "--dangerously-skip-permissions"], environment


class MiniSweAgent(Client):
    name = "mini-swe-agent"
    prints_answer = False
    wires = ("chat-whole",)

    def command(self, wire, place):
        environment = {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": str(place.home / "mini"),
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_NAME": f"openai/{MODEL}",
            "OPENAI_API_BASE": place.v1,
            "OPENAI_API_KEY": place.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        output = str(place.folder / "trajectory.json")
        return ["mini", "-y", "--exit-immediately", "-t", PROMPT, "-o", output], environment


class Sdk(Client):
    """A script of ours on an SDK."""

    def __init__(self, name, script, wires):
        self.name, self.script = name, script
        self.wires = tuple(f"{wire}{how}" for wire in wires for how in ("", "-whole"))

    def folder(self, place):
        return place.clients / ("sdk-js" if self.script.endswith(".mjs") else "sdk-py")

    def path(self, place):
        return [str(self.folder(place) / "bin")]

    def command(self, wire, place):
        wire, _, whole = wire.partition("-")
        program = "node" if self.script.endswith(".mjs") else str(self.folder(place) / "bin/python")
        environment = {"MODEL": MODEL, "SDK_FOLDER": str(self.folder(place))}
        if "anthropic" in self.script:
            environment |= {"ANTHROPIC_BASE_URL": place.root, "ANTHROPIC_API_KEY": place.key}
        else:
            environment |= {"OPENAI_BASE_URL": place.v1, "OPENAI_API_KEY": place.key}
        return [program, str(place.scripts / self.script), wire, whole or "stream"], environment


class OpenCode(Client):
    name = "opencode"
    wires = ("chat", "messages", "responses")
    is_in_ci = False
    why_rewritten = {
        "responses": "it sends no reasoning back",
        ("chat", "drop_mid_stream"): "it puts the call that broke off into its history, without arguments",
        ("messages", "drop_mid_stream"): "it puts the call that broke off into its history, without arguments",
    }
    why_broke = {
        "responses": ["reasoning_dropped"] * 2,
        ("chat", "drop_mid_stream"): ["message_edited"],
        ("messages", "drop_mid_stream"): ["message_edited"],
    }
    why_broken = {
        (wire, "drop_mid_stream"): (1, "it puts what it had of the reply that broke off into its history")
        for wire in wires
    }
    packages = {"chat": "@ai-sdk/openai-compatible", "messages": "@ai-sdk/anthropic", "responses": "@ai-sdk/openai"}

    def command(self, wire, place):
        provider = {
            "npm": self.packages[wire],
            # With /v1 on the Messages wire too.
            "options": {"baseURL": place.v1, "apiKey": place.key},
            "models": {MODEL: {"limit": {"context": 131072, "output": 8192}}},
        }
        config = {
            "model": f"lego/{MODEL}",
            "small_model": f"lego/{MODEL}",
            "share": "disabled",
            "autoupdate": False,
            "provider": {"lego": provider},
        }
        environment = {
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        }
        return ["opencode", "run", PROMPT], environment


class QwenCode(Client):
    why_rewritten = {"chat": "it trims the reasoning that it sends back"}
    why_broke = {"chat": ["whitespace_changed"] * 2}
    why_broken = {("chat", "drop_mid_stream"): (1, "it asks to resume what broke off, and takes that out again")}
    name = "qwen-code"
    wires = ("chat",)
    is_in_ci = False

    def command(self, wire, place):
        settings = {
            "security": {"auth": {"selectedType": "openai"}},
            "privacy": {"usageStatisticsEnabled": False},
        }
        place.write(".qwen/settings.json", settings)
        environment = {"OPENAI_BASE_URL": place.v1, "OPENAI_API_KEY": place.key, "OPENAI_MODEL": MODEL}
        return ["qwen", "-y", "-p", PROMPT], environment


class OpenHands(Client):
    name = "openhands"
    prints_answer = False
    wires = ("chat-whole",)
    is_in_ci = False
    why_rewritten = {"chat-whole": "it sends no reasoning back"}
    why_broke = {"chat-whole": ["reasoning_dropped"] * 2}

    def command(self, wire, place):
        environment = {
            "LLM_MODEL": f"openai/{MODEL}",
            "LLM_BASE_URL": place.v1,
            "LLM_API_KEY": place.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        }
        python = str(place.clients / self.name / "bin/python")
        return [python, str(place.scripts / "openhands_task.py"), PROMPT], environment


class Terminus2(Client):
    name = "terminus-2"
    prints_answer = False
    wires = ("chat-whole", "chat-whole-ids")
    is_in_ci = False
    why_rewritten = {"chat-whole": "it sends no reasoning back"}
    # It asks for the last turn twice.
    why_broke = {"chat-whole": ["reasoning_dropped"] * 3}
    why_in_chat = {"chat-whole-ids": "it asks for log-probs and ids itself, which have another form in completions"}

    def command(self, wire, place):
        environment = {
            "MODEL": f"openai/{MODEL}",
            "OPENAI_API_BASE": place.v1,
            "OPENAI_API_KEY": place.key,
            "LOGS": str(place.folder / "logs"),
            "WITH_IDS": "1" if wire.endswith("-ids") else "0",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        python = str(place.clients / self.name / "bin/python")
        return [python, str(place.scripts / "terminus_task.py"), PROMPT], environment


CLIENTS = [
    Pi(),
    Codex(),
    ClaudeCode(),
    MiniSweAgent(),
    Sdk("openai-py", "sdk_openai.py", ("chat", "responses")),
    Sdk("openai-js", "sdk_openai.mjs", ("chat", "responses")),
    Sdk("anthropic-py", "sdk_anthropic.py", ("messages",)),
    Sdk("anthropic-js", "sdk_anthropic.mjs", ("messages",)),
    OpenCode(),
    QwenCode(),
    OpenHands(),
    Terminus2(),
]
