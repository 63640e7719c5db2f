// A small agent on Anthropic's JavaScript SDK: it has one tool, bash, and runs until the model calls it no more.
//
// usage: sdk_anthropic.mjs messages whole|stream
// environment: ANTHROPIC_BASE_URL (without /v1), ANTHROPIC_API_KEY, MODEL, SDK_FOLDER (where node_modules lies)
//
// A stream that ends without message_stop must throw, here or in the SDK: the turn is then asked for again, once. A
// stream that breaks and ends as if it were whole ends this program with an error.

import { spawnSync } from "node:child_process";
import { createRequire } from "node:module";

const { Anthropic } = createRequire(process.env.SDK_FOLDER + "/")("@anthropic-ai/sdk");

const PROMPT = "Make the files made_by_turn1.txt and made_by_turn2.txt, one after the other, with the shell.";
const SCHEMA = { type: "object", properties: { command: { type: "string" } }, required: ["command"] };
// What lego asks the upstream for must not reach who did not ask for it; null is what engines write then.
const FOREIGN = ["prompt_token_ids", "token_ids", "weight_versions"];

// What must never happen: it ends this program.
class Wrong extends Error {}

function run(command) {
  const done = spawnSync("bash", ["-c", command], { stdio: ["ignore", "pipe", "pipe"] });
  return done.stdout.toString() + done.stderr.toString();
}

function clean(reply) {
  const text = JSON.stringify(reply);
  for (const name of FOREIGN) if (text.includes(`"${name}":[`)) throw new Wrong(`${name} in ${text}`);
}

async function ask(client, isStream, messages) {
  const asked = {
    model: process.env.MODEL,
    max_tokens: 4096,
    system: "You make files, one at a time.",
    thinking: { type: "enabled", budget_tokens: 2048 },
    tools: [{ name: "bash", description: "Runs a command.", input_schema: SCHEMA }],
    messages,
  };
  if (!isStream) {
    const reply = await client.messages.create(asked);
    clean(reply);
    return reply;
  }
  const stream = client.messages.stream(asked);
  let stopped = false;
  for await (const event of stream) {
    clean(event);
    stopped ||= event.type === "message_stop";
  }
  if (!stopped) throw new Wrong("a broken stream ended cleanly: no message_stop");
  return await stream.finalMessage();
}

async function main(how) {
  const client = new Anthropic();
  const messages = [{ role: "user", content: PROMPT }];
  let retried = false;
  for (let turn = 0; turn < 8; turn++) {
    let reply;
    try {
      reply = await ask(client, how === "stream", messages);
    } catch (error) {
      console.log(`${error.constructor.name}: ${error.message}`);
      if (error instanceof Wrong) return 3;
      if (retried) return 1;
      retried = true;
      continue;
    }
    console.log(JSON.stringify(reply.content), reply.stop_reason);
    messages.push({ role: "assistant", content: reply.content });
    const calls = reply.content.filter((block) => block.type === "tool_use");
    if ((reply.stop_reason === "tool_use") !== (calls.length > 0)) return 5;
    if (calls.length === 0) return 0;
    const result = (call) => ({ type: "tool_result", tool_use_id: call.id, content: run(call.input.command) });
    messages.push({ role: "user", content: calls.map(result) });
  }
  console.log("the model never came to an end");
  return 4;
}

process.exitCode = await main(process.argv[3]);
