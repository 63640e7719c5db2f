// A small agent on Anthropic's JavaScript SDK: it has one tool, bash, and runs until the model calls it no more.
//
// usage: sdk_anthropic.mjs messages whole|stream
//        sdk_anthropic.mjs messages fixtures NAME:HOW...    what the SDK reads of replies
// environment: ANTHROPIC_BASE_URL (without /v1), ANTHROPIC_API_KEY, MODEL, SDK_FOLDER (where node_modules lies)

import { CleanEndOfABrokenStream, MODEL, PROMPT, SCHEMA, Wrong, clean, converse, load, readFixtures } from "./sdk.mjs";

const { Anthropic } = load("@anthropic-ai/sdk");

async function ask(client, isStream, messages, headers) {
  const asked = {
    model: MODEL,
    max_tokens: 4096,
    system: "You make files, one at a time.",
    thinking: { type: "enabled", budget_tokens: 2048 },
    tools: [{ name: "bash", description: "Runs a command.", input_schema: SCHEMA }],
    messages,
  };
  if (!isStream) {
    const reply = await client.messages.create(asked, { headers });
    clean(reply);
    return reply;
  }
  const stream = client.messages.stream(asked, { headers });
  let stopped = false;
  for await (const event of stream) {
    clean(event);
    stopped ||= event.type === "message_stop";
  }
  if (!stopped) throw new CleanEndOfABrokenStream("no message_stop");
  return await stream.finalMessage();
}

// What a reply says, for comparison.
function saidBy({ content, stop_reason, usage }) {
  const of = (type) => content.filter((block) => block.type === type);
  return {
    text: of("text").map((block) => block.text).join(""),
    reasoning: of("thinking").map((block) => block.thinking).join(""),
    calls: of("tool_use").map((block) => [block.id, block.name, JSON.stringify(block.input)]),
    finish: stop_reason,
    usage: [usage.input_tokens, usage.output_tokens],
  };
}

async function main(_, how, ...fixtures) {
  const client = new Anthropic();
  const messages = [{ role: "user", content: PROMPT }];
  if (how === "fixtures") {
    const read = async (isStream, headers) => saidBy(await ask(client, isStream, messages, headers));
    return readFixtures(read, fixtures);
  }
  let results = [];
  const turn = async () => {
    if (results.length > 0) messages.push({ role: "user", content: results });
    results = [];
    const reply = await ask(client, how === "stream", messages);
    console.log(JSON.stringify(reply.content), reply.stop_reason);
    messages.push({ role: "assistant", content: reply.content });
    const calls = reply.content.filter((block) => block.type === "tool_use");
    if ((reply.stop_reason === "tool_use") !== (calls.length > 0)) throw new Wrong(`stop reason ${reply.stop_reason}`);
    return calls.map((call) => [call.id, call.input.command]);
  };
  return converse(turn, (id, output) => results.push({ type: "tool_result", tool_use_id: id, content: output }));
}

process.exitCode = await main(...process.argv.slice(2));
