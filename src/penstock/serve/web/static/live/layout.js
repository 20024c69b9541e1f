// Elements of the live view.

import { hasLibraries } from "../render/libraries.js";
import { make } from "../ui/dom.js";

const COLUMNS = ["Request", "State", "Prompt", "Cached", "Computed", "Output", "Seconds", "Blocks", "Shares blocks with"];
const BLOCKS = [["free", "free"], ["cached", "free, with a cached prefix"], ["used", "one sequence"], ["shared", "shared"], ["chosen", "selected sequence"]];
const NO_CHARTS = "This build has no charts: it was made without npm. The figures above are complete.";

const chart = (id, title) => make("figure", { className: "card" },
  make("figcaption", {}, make("span", {}, title), make("span", { id: `${id}-summary`, className: "summary" })),
  make("div", { id, className: hasLibraries ? "chart" : "quiet", role: "img", "aria-label": title }, hasLibraries ? "" : NO_CHARTS));

/** Fill the section of the live view. */
export function layOut(section) {
  const caption = (text, more = {}) => make("figcaption", more, text);
  section.replaceChildren(
    make("h2", { id: "live-title", className: "hidden" }, "Live view"),
    make("div", { className: "live-head" },
      make("label", { className: "line" }, "Engine ", make("select", { id: "engine" })),
      make("label", { className: "check" }, make("input", { type: "checkbox", id: "hold" }), "Pause"),
      make("span", { id: "live-state", className: "problem", role: "status" })),
    make("div", { id: "tiles", className: "tiles" }),
    make("div", { className: "charts" },
      chart("chart-tokens", "Tokens per second"), chart("chart-queue", "Sequences"),
      chart("chart-ttft", "Time to first token"), chart("chart-itl", "Inter-token latency")),
    make("figure", { className: "card" }, caption("Steps (height: tokens, width: duration); hover or use the arrow keys for details"),
      make("canvas", { id: "chart-steps", tabIndex: 0, role: "img" }), make("p", { id: "step", className: "quiet", "aria-live": "polite" }, "\u00a0")),
    make("figure", { className: "card" }, caption("KV cache", { id: "blocks-title" }), make("canvas", { id: "blocks", role: "img" }),
      make("p", { className: "legend" }, ...BLOCKS.map(([name, text]) => make("span", { className: name }, text)))),
    make("div", { className: "card scroll", tabIndex: 0, role: "region", "aria-label": "Sequences" },
      make("table", { id: "sequences" }, make("caption", {}, "Sequences (select one to see its blocks)"),
        make("thead", {}, make("tr", {}, ...COLUMNS.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}))),
    make("p", { id: "live-hidden", className: "quiet" }));
}
