// Requests to this server, with the API key if required. The key is kept only in this tab.

const STORED = "penstock-api-key";
let asking = null;

export const hasKey = () => Boolean(sessionStorage.getItem(STORED));

/** Ask for an API key; resolves to true if a key was entered. Concurrent callers share one dialog. */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    field.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "ok" && field.value.trim();
      if (given) sessionStorage.setItem(STORED, field.value.trim());
      field.value = "";
      resolve(Boolean(given));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** fetch() with the key; asks for a key if the key is missing or wrong. Throws an Error with the server's message. */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers });
    if (response.status === 401 && !options.silent && await askForKey()) continue;
    if (!response.ok) throw new Error(await reasonOf(response));
    return response;
  }
}

async function reasonOf(response) {
  const text = await response.text();
  try {
    const document = JSON.parse(text);
    return document.error?.message ?? document.message ?? text;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

/** Yield the events of a streamed answer as objects. */
export async function* stream(path, body, signal) {
  const response = await call(path, {
    method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const lines = buffer.split("\n");
    buffer = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message ?? String(event.error));
      yield event;
    }
  }
}
