// Run by test_javascript.py, in node and in a browser: the error of the second of two sessions.

import { connect } from "../../docs/trioengine.mjs";

export async function run(url, apiKey) {
  const sessions = [];
  try {
    for (let count = 0; count < 2; count++) sessions.push(await connect(url, { apiKey }));
    return "connected";
  } catch (error) {
    return [sessions.length, error.code, error.status, error.retryAfter, error.message];
  } finally {
    await Promise.all(sessions.map((session) => session.close()));
  }
}
