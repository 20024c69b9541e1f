// Icons: strokes on a grid of 24 × 24.

const PATHS = {
  sidebar: "M4 5h16v14H4zM9.5 5v14",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  search: "M11 5a6 6 0 1 0 0 12 6 6 0 0 0 0-12M15.5 15.5L20 20",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9h.01",
  down: "M12 5v14M6 13l6 6 6-6",
  code: "M8 7l-5 5 5 5M16 7l5 5-5 5",
  key: "M15 9a4 4 0 1 0-4.5 4L4 19.5V21h3v-2h2v-2l1.5-1.5M16 8h.01",
  keyboard: "M3 7h18v10H3zM7 10.5h.01M11 10.5h.01M15 10.5h.01M8 14h8",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4 10-11",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  resume: "M7 5l11 7-11 7z",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  tokens: "M4 7h6M13 7h7M4 12h9M16 12h4M4 17h4M11 17h9",
  tool: "M14 7a4 4 0 0 1 5-3l-2.5 2.5 1 1L20 5a4 4 0 0 1-5 5l-8 9-2-2 8.5-8",
  alert: "M12 4L2.5 20h19zM12 10v4M12 17h.01",
};

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("glyph");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}
