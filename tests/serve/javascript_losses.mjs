// Run by test_javascript.py in node, beside servers that it kills and starts: a conversation that outlives its connection.

import { connect } from "../../docs/trioengine.mjs";
import { order } from "./javascript_orders.mjs";

const GREEDY = { temperature: 0, max_output_tokens: 40 };
const LONG = { temperature: 0, max_output_tokens: 400, ignore_eos: true };

async function thrown(promise) {
  try {
    await promise;
  } catch (error) {
    return [error.code, error.closeCode, error.message];
  }
}

const [url] = process.argv.slice(2);
const losses = [];
let noteLoss;
const lost = () => new Promise((resolve) => (noteLoss = resolve));
const onLoss = (error) => {
  losses.push(error.code);
  noteLoss?.();
};
const session = await connect(url, { history: [{ role: "system", content: "be brief" }], onLoss });
const ids = [session.id];
await session.update({ max_output_tokens: 40 });
await session.say("a note");
await session.generate("hello", GREEDY).result();

const interrupted = session.generate("lost", LONG);
await interrupted[Symbol.asyncIterator]().next();
await order("kill");
const loss = await thrown(interrupted.result());
const refusal = await thrown(session.generate("are you there?", GREEDY).result());
await order("start");
const after = await session.generate("what now?", { temperature: 0 }).result();
ids.push(session.id);

const kept = session.generate("kept", LONG, { keepPartial: true });
await kept[Symbol.asyncIterator]().next();
await order("kill");
await thrown(kept.result());
await order("start");
const [added, one] = [session.say("beside"), session.generate("one", GREEDY)]; // both find no connection
await added;
const afterKept = await one.result();
const history = session.history;

const idle = lost();
await order("kill");
await idle;
await order("start");
await session.close();
const closed = await thrown(session.generate("x").result());
const results = { loss, refusal, after: after.text, afterKept: afterKept.text, kept: kept.text, history, losses, closed };
console.log(JSON.stringify({ results, areDifferent: ids[0] !== ids[1] }));
process.exit(0);
