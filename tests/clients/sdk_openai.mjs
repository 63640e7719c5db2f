// A small agent on OpenAI's JavaScript SDK: it has one tool, bash, and runs until the model calls it no more.
//
// usage: sdk_openai.mjs chat|responses whole|stream
//        sdk_openai.mjs chat|responses fixtures NAME:HOW...    what the SDK reads of replies
// environment: OPENAI_BASE_URL, OPENAI_API_KEY, MODEL, SDK_FOLDER (where node_modules lies)

import { CleanEndOfABrokenStream, MODEL, PROMPT, SCHEMA, clean, converse, load, readFixtures } from "./sdk.mjs";

const { OpenAI } = load("openai");

const ABOUT = { name: "bash", description: "Runs a command.", parameters: SCHEMA };

class Chat {
  constructor(client) {
    this.client = client;
    this.messages = [{ role: "user", content: PROMPT }];
  }

  // Asks for a turn. Gives what it says.
  async read(isStream, headers) {
    const asked = { model: MODEL, messages: this.messages, tools: [{ type: "function", function: ABOUT }] };
    // Who reads fixtures wants the usage, too.
    if (isStream && headers) asked.stream_options = { include_usage: true };
    const said = isStream ? await this.streamed(asked, { headers }) : await this.whole(asked, { headers });
    return { ...said, usage: said.usage && [said.usage.prompt_tokens, said.usage.completion_tokens] };
  }

  async whole(asked, options) {
    const reply = await this.client.chat.completions.create(asked, options);
    clean(reply);
    const { message, finish_reason } = reply.choices[0];
    const calls = (message.tool_calls ?? []).map((call) => [call.id, call.function.name, call.function.arguments]);
    const { content, reasoning } = message;
    return { text: content ?? "", reasoning: reasoning ?? "", calls, finish: finish_reason, usage: reply.usage };
  }

  async streamed(asked, options) {
    const said = { text: "", reasoning: "", calls: [], finish: null, usage: null };
    for await (const chunk of await this.client.chat.completions.create({ ...asked, stream: true }, options)) {
      clean(chunk);
      said.usage = chunk.usage ?? said.usage;
      for (const { delta, finish_reason } of chunk.choices) {
        said.finish = finish_reason ?? said.finish;
        said.text += delta.content ?? "";
        said.reasoning += delta.reasoning ?? "";
        for (const part of delta.tool_calls ?? []) {
          const call = (said.calls[part.index] ??= ["", "", ""]);
          if (part.id) [call[0], call[1]] = [part.id, part.function.name];
          call[2] += part.function.arguments ?? "";
        }
      }
    }
    if (said.finish === null) throw new CleanEndOfABrokenStream("no finish_reason");
    return said;
  }

  // Puts a turn into the history.
  keep({ text, reasoning, calls }) {
    const message = { role: "assistant", content: text };
    if (reasoning) message.reasoning = reasoning;
    const call = ([id, name, args]) => ({ id, type: "function", function: { name, arguments: args } });
    if (calls.length > 0) message.tool_calls = calls.map(call);
    this.messages.push(message);
  }

  result(id, output) {
    this.messages.push({ role: "tool", tool_call_id: id, content: output });
  }
}

class Responses {
  constructor(client) {
    this.client = client;
    this.input = [{ role: "user", content: PROMPT }];
  }

  // Asks for a turn. Gives what it says.
  async read(isStream, headers) {
    const tools = [{ type: "function", strict: false, ...ABOUT }];
    const asked = { model: MODEL, input: this.input, tools, store: false };
    let reply = null;
    if (isStream) {
      for await (const event of await this.client.responses.create({ ...asked, stream: true }, { headers })) {
        clean(event);
        if (event.type === "response.completed") reply = event.response;
        if (["response.failed", "error"].includes(event.type)) throw new Error(JSON.stringify(event));
      }
      if (reply === null) throw new CleanEndOfABrokenStream("no response.completed");
    } else {
      reply = await this.client.responses.create(asked, { headers });
      clean(reply);
    }
    if (reply.status !== "completed") throw new Error(reply.status);
    const of = (type) => reply.output.filter((item) => item.type === type);
    const texts = (items) => items.flatMap((item) => item.content.map((part) => part.text)).join("");
    return {
      text: texts(of("message")),
      reasoning: texts(of("reasoning")),
      calls: of("function_call").map((item) => [item.call_id, item.name, item.arguments]),
      finish: reply.status,
      usage: reply.usage && [reply.usage.input_tokens, reply.usage.output_tokens],
      output: reply.output,
    };
  }

  // Puts a turn into the history.
  keep({ output }) {
    this.input.push(...output);
  }

  result(id, output) {
    this.input.push({ type: "function_call_output", call_id: id, output });
  }
}

async function main(wire, how, ...fixtures) {
  const agent = new { chat: Chat, responses: Responses }[wire](new OpenAI());
  if (how === "fixtures") return readFixtures((isStream, headers) => agent.read(isStream, headers), fixtures);
  const turn = async () => {
    const said = await agent.read(how === "stream");
    console.log(`text: ${said.text}`);
    agent.keep(said);
    return said.calls.map(([id, , args]) => [id, JSON.parse(args).command]);
  };
  return converse(turn, (id, output) => agent.result(id, output));
}

process.exitCode = await main(...process.argv.slice(2));
