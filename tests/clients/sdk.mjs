// What the programs on the JavaScript SDKs share: the task, the agent's loop, and the reading of fixtures.
//
// A stream that ends without the protocol's own end must throw, here or in the SDK. The agent then asks for the turn
// again, once; a stream that breaks and ends as if it were whole ends the program with an error.

import { spawnSync } from "node:child_process";
import { createRequire } from "node:module";

export const PROMPT = "Make the files made_by_turn1.txt and made_by_turn2.txt, one after the other, with the shell.";
export const SCHEMA = { type: "object", properties: { command: { type: "string" } }, required: ["command"] };
export const MODEL = process.env.MODEL;
// What lego asks the upstream for must not reach who did not ask for it; null is what engines write then.
const FOREIGN = ["prompt_token_ids", "token_ids", "weight_versions"];

// A package of SDK_FOLDER.
export const load = createRequire(process.env.SDK_FOLDER + "/");

// What must never happen: it ends this program.
export class Wrong extends Error {}

export class CleanEndOfABrokenStream extends Wrong {}

export function clean(reply) {
  // SGLang's own metadata is sent to all.
  const text = JSON.stringify({ ...reply, metadata: undefined });
  for (const name of FOREIGN) if (text.includes(`"${name}":[`)) throw new Wrong(`${name} in ${text}`);
}

function run(command) {
  const done = spawnSync("bash", ["-c", command], { stdio: ["ignore", "pipe", "pipe"] });
  return done.stdout.toString() + done.stderr.toString();
}

// Runs the agent to its end. `turn` asks for a turn and gives its tool calls, [id, command]; `result` takes what a
// command printed. Gives the exit code.
export async function converse(turn, result) {
  let retried = false;
  for (let number = 0; number < 8; number++) {
    let calls;
    try {
      calls = await turn();
    } catch (error) {
      console.log(`${error.constructor.name}: ${error.message}`);
      if (error instanceof Wrong) return 3;
      if (retried) return 1;
      retried = true;
      continue;
    }
    if (calls.length === 0) return 0;
    for (const [id, command] of calls) {
      console.log(`bash: ${command}`);
      result(id, run(command));
    }
  }
  console.log("the model never came to an end");
  return 4;
}

// Prints what the SDK reads of each fixture, one JSON line each. A fixture is NAME:whole, NAME:stream or NAME:half, a
// stream that breaks off in its middle. `read` takes whether it is a stream, and the headers by which the upstream knows
// what to send.
export async function readFixtures(read, fixtures) {
  for (const fixture of fixtures) {
    const [name, how] = fixture.split(":");
    let said;
    try {
      said = await read(how !== "whole", { "x-fixture": name, "x-half": how === "half" ? "True" : "False" });
    } catch (error) {
      said = { error: error.constructor.name, about: error.message };
    }
    console.log(JSON.stringify({ fixture, ...said }));
  }
  return 0;
}
