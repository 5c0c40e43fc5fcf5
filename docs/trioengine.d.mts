export * from "./trioengine.js"; // trioengine.d.ts, for those who import trioengine.mjs
