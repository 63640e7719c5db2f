// A small agent on OpenAI's JavaScript SDK: it has one tool, bash, and runs until the model calls it no more.
//
// usage: sdk_openai.mjs chat|responses whole|stream
// environment: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL, SDK_FOLDER (where node_modules lies)
//
// A stream that ends without the protocol's own end must throw, here or in the SDK: the turn is then asked for again,
// once. A stream that breaks and ends as if it were whole ends this program with an error.

import { spawnSync } from "node:child_process";
import { createRequire } from "node:module";

const { OpenAI } = createRequire(process.env.SDK_FOLDER + "/")("openai");

const PROMPT = "Make the files made_by_turn1.txt and made_by_turn2.txt, one after the other, with the shell.";
const ABOUT = {
  name: "bash",
  description: "Runs a command.",
  parameters: { type: "object", properties: { command: { type: "string" } }, required: ["command"] },
};
// What lego asks the upstream for must not reach who did not ask for it; null is what engines write then.
const FOREIGN = ["prompt_token_ids", "token_ids", "weight_versions"];
const MODEL = process.env.MODEL;

// What must never happen: it ends this program.
class Wrong extends Error {}

function run(args) {
  const done = spawnSync("bash", ["-c", JSON.parse(args).command], { stdio: ["ignore", "pipe", "pipe"] });
  return done.stdout.toString() + done.stderr.toString();
}

function clean(reply) {
  const text = JSON.stringify(reply);
  for (const name of FOREIGN) if (text.includes(`"${name}":[`)) throw new Wrong(`${name} in ${text}`);
}

class Chat {
  constructor(client, stream) {
    this.client = client;
    this.stream = stream;
    this.messages = [{ role: "user", content: PROMPT }];
  }

  async turn() {
    const asked = { model: MODEL, messages: this.messages, tools: [{ type: "function", function: ABOUT }] };
    const message = this.stream ? await this.streamed(asked) : await this.whole(asked);
    this.messages.push(message);
    const calls = (message.tool_calls ?? []).map((call) => [call.id, call.function.arguments]);
    return [message.content, calls];
  }

  async whole(asked) {
    const reply = await this.client.chat.completions.create(asked);
    clean(reply);
    const { role, content, reasoning, tool_calls } = reply.choices[0].message;
    return { role, content, reasoning, tool_calls };
  }

  async streamed(asked) {
    const message = { role: "assistant", content: "" };
    let reason = null;
    for await (const chunk of await this.client.chat.completions.create({ ...asked, stream: true })) {
      clean(chunk);
      for (const { delta, finish_reason } of chunk.choices) {
        reason = finish_reason ?? reason;
        message.content += delta.content ?? "";
        if (delta.reasoning) message.reasoning = (message.reasoning ?? "") + delta.reasoning;
        for (const part of delta.tool_calls ?? []) {
          message.tool_calls ??= [];
          const call = (message.tool_calls[part.index] ??= { type: "function", function: { arguments: "" } });
          if (part.id) {
            call.id = part.id;
            call.function.name = part.function.name;
          }
          call.function.arguments += part.function.arguments ?? "";
        }
      }
    }
    if (reason === null) throw new Wrong("a broken stream ended cleanly: no finish_reason");
    return message;
  }

  result(id, output) {
    this.messages.push({ role: "tool", tool_call_id: id, content: output });
  }
}

class Responses {
  constructor(client, stream) {
    this.client = client;
    this.stream = stream;
    this.input = [{ role: "user", content: PROMPT }];
  }

  async turn() {
    const tools = [{ type: "function", strict: false, ...ABOUT }];
    const asked = { model: MODEL, input: this.input, tools, store: false };
    let reply = null;
    if (this.stream) {
      for await (const event of await this.client.responses.create({ ...asked, stream: true })) {
        clean(event);
        if (event.type === "response.completed") reply = event.response;
        if (["response.failed", "error"].includes(event.type)) throw new Error(JSON.stringify(event));
      }
      if (reply === null) throw new Wrong("a broken stream ended cleanly: no response.completed");
    } else {
      reply = await this.client.responses.create(asked);
      clean(reply);
    }
    if (reply.status !== "completed") throw new Error(reply.status);
    this.input.push(...reply.output);
    const calls = reply.output.filter((item) => item.type === "function_call");
    const texts = reply.output.filter((item) => item.type === "message").map((item) => item.content[0].text);
    return [texts.join(""), calls.map((item) => [item.call_id, item.arguments])];
  }

  result(id, output) {
    this.input.push({ type: "function_call_output", call_id: id, output });
  }
}

async function main(wire, how) {
  const agent = new { chat: Chat, responses: Responses }[wire](new OpenAI(), how === "stream");
  let retried = false;
  for (let turn = 0; turn < 8; turn++) {
    let text, calls;
    try {
      [text, calls] = await agent.turn();
    } catch (error) {
      console.log(`${error.constructor.name}: ${error.message}`);
      if (error instanceof Wrong) return 3;
      if (retried) return 1;
      retried = true;
      continue;
    }
    console.log(`text: ${text}`);
    if (calls.length === 0) return 0;
    for (const [id, args] of calls) {
      console.log(`bash: ${args}`);
      agent.result(id, run(args));
    }
  }
  console.log("the model never came to an end");
  return 4;
}

process.exitCode = await main(process.argv[2], process.argv[3]);
