// Run by test_javascript_images.py: a program that sends images with docs/trioengine.mjs, and loses its connection.

import { connect } from "../../docs/trioengine.mjs";

const GREEDY = { temperature: 0, max_output_tokens: 5, ignore_eos: true };

async function refused(generation) {
  try {
    await generation.result();
  } catch (error) {
    return [error.code, error.param];
  }
}

export async function run(url, picture, other) {
  const results = {};
  const bytes = Uint8Array.from(atob(picture.split(",")[1]), (character) => character.charCodeAt(0));
  const sockets = [];
  class Socket extends WebSocket {
    constructor(...args) {
      super(...args);
      sockets.push(this);
    }
  }
  const session = await connect(url, { WebSocket: Socket });
  const ask = async (text, media) => (await session.generate(text, GREEDY, { media }).result()).text;
  results.answers = [await ask("What?", [new Blob([bytes])]), await ask("And?", [bytes.buffer, other])];
  results.refused = await refused(session.generate("x", GREEDY, { media: [new Uint8Array([1, 2])] }));
  results.strange = await refused(session.generate("x", GREEDY, { media: ["picture.png"] }));
  results.history = session.history;
  const lost = new Promise((resolve) => sockets[0].addEventListener("close", resolve));
  sockets[0].close();
  await lost;
  results.after = await ask("Then?", []);
  results.alone = (await session.generate(undefined, GREEDY, { media: [bytes] }).result()).text;
  await session.close();
  const again = await connect(url, { history: results.history });
  results.again = (await again.generate("Then?", GREEDY).result()).text;
  await again.close();
  results.connections = sockets.length;
  return results;
}
