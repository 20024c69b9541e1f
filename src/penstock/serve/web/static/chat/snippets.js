// A request as curl and Python code. The code reads the API key from the environment.

import { storedKey } from "../api/key.js";

const SHORT = 200;

/** Shorten images in data URLs. */
const shorten = (key, value) =>
  typeof value === "string" && value.startsWith("data:") && value.length > SHORT ? `${value.slice(0, 60)}…` : value;

export function asCurl(path, body) {
  const url = new URL(path, document.baseURI).href;
  const key = storedKey() ? " \\\n  -H \"Authorization: Bearer $PENSTOCK_API_KEY\"" : "";
  const data = JSON.stringify(body, shorten, 2).replaceAll("'", "'\\''");
  return `curl ${url}${key} \\\n  -H "Content-Type: application/json" \\\n  -d '${data}'`;
}

export function asPython(path, body) {
  const base = new URL("v1", document.baseURI).href;
  const method = path.endsWith("chat/completions") ? "chat.completions" : "completions";
  const known = new Set(["model", "messages", "prompt", "temperature", "max_tokens", "top_p", "seed", "presence_penalty",
    "frequency_penalty", "stop", "n", "logprobs", "top_logprobs", "tools", "response_format", "stream", "stream_options"]);
  const lines = [], extra = {};
  for (const [name, value] of Object.entries(body)) {
    if (known.has(name)) lines.push(`    ${name}=${literal(value, 4)},`);
    else extra[name] = value;
  }
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, 4)},`);
  const key = storedKey() ? "os.environ[\"PENSTOCK_API_KEY\"]" : "\"none\"";
  const show = method === "completions"
    ? "print(chunk.choices[0].text, end=\"\")" : "print(chunk.choices[0].delta.content or \"\", end=\"\")";
  return `${storedKey() ? "import os\n\n" : ""}from openai import OpenAI\n\n`
    + `client = OpenAI(base_url=${literal(base)}, api_key=${key})\n`
    + `stream = client.${method}.create(\n${lines.join("\n")}\n)\nfor chunk in stream:\n    if chunk.choices:\n        ${show}\n`;
}

/** Format a value as a Python literal. */
function literal(value, indent = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(shorten("", value));
  const isList = Array.isArray(value);
  const entries = isList ? value.map((one) => literal(one, indent + 4))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, indent + 4)}`);
  const [open, close] = isList ? "[]" : "{}";
  const line = `${open}${entries.join(", ")}${close}`;
  if (line.length < 90 && !line.includes("\n")) return line;
  const pad = " ".repeat(indent + 4);
  return `${open}\n${entries.map((one) => `${pad}${one},\n`).join("")}${" ".repeat(indent)}${close}`;
}
