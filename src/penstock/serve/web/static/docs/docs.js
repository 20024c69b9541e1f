// The HTTP API: the server's OpenAPI document, shown by Swagger UI.

import { call } from "../api/client.js";
import { storedKey } from "../api/key.js";
import { hasLibraries, loadReference } from "../render/libraries.js";
import { $, drawIcons } from "../ui/dom.js";
import { startTheme, theme } from "../ui/theme.js";

const NO_LIBRARIES = "This build cannot show the API: it was made without npm. The OpenAPI document is at openapi.json.";

async function start() {
  if (!hasLibraries) return void ($("state").textContent = NO_LIBRARIES);
  const [bundle, answer] = await Promise.all([loadReference(), call("openapi.json")]);
  bundle({
    spec: await answer.json(),
    domNode: $("reference"),
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    filter: true,
    requestInterceptor(request) {
      if (storedKey()) request.headers.Authorization = `Bearer ${storedKey()}`;
      return request;
    },
    validatorUrl: null,
    plugins: [{ wrapComponents: { InfoContainer: inSection("About this API", "Operations"), FilterContainer: inSection("Filter") } }],
  });
  $("state").parentElement.remove();
}

// Swagger UI's <main> has only the operations: the parts before it need regions of their own. The names of tags are
// headings of level 3, and nothing has level 2.
function inSection(label, nextHeading) {
  return (Part, { React: { createElement } }) => (properties) => createElement(
    "section", { "aria-label": label }, createElement(Part, properties),
    nextHeading && createElement("h2", { className: "read-only" }, nextHeading),
  );
}

drawIcons();
startTheme(() => document.documentElement.classList.toggle("dark-mode", theme() === "dark"));
start().catch((error) => { $("state").textContent = `${error.message} ${error.hint ?? ""}`; });
