// Server-sent events of a streamed answer.

import { call, RequestError } from "./client.js";

/** The answer ended without its end marker: a proxy, the network or the server cut it. */
export class StreamCut extends Error {}

/** Yield the events of a streamed answer as objects. Throws StreamCut if the end marker is missing. */
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal,
  });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new RequestError(event.error.message ?? String(event.error), event.error.code ?? 500);
    yield event;
  }
  throw new StreamCut();
}

/** Yield the data of each event. */
async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    let chunk;
    try {
      chunk = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new StreamCut();
    }
    if (chunk.done) return;
    const lines = (buffer + chunk.value).split("\n");
    buffer = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
