export * from "./trioengine.js"; // trioengine.d.ts, for imports of trioengine.mjs
