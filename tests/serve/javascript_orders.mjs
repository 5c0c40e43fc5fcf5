// A script asks the test that runs it to do something.

import { createInterface } from "node:readline";

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

/** Ask the test to do this, and wait until it is done. */
export async function order(command) {
  console.log(JSON.stringify({ order: command }));
  await lines.next();
}
