// Libraries, loaded when they are first needed. Without npm the build has none.

const addresses = JSON.parse(document.querySelector('meta[name="penstock-libraries"]').content);
const loaded = new Map();

export const hasLibraries = Object.keys(addresses).length > 0;

const once = (name, load) => {
  if (!loaded.has(name)) loaded.set(name, load());
  return loaded.get(name);
};

/** Load a classic script; resolves to the global that it defines. */
const script = (file, global) => once(file, () => new Promise((resolve, reject) => {
  const element = document.createElement("script");
  element.src = addresses[file];
  element.onload = () => resolve(window[global]);
  element.onerror = () => reject(new Error(`${file} was not loaded`));
  document.head.append(element);
}));

const style = (file) => once(file, () => new Promise((resolve) => {
  const element = document.createElement("link");
  element.rel = "stylesheet";
  element.href = addresses[file];
  element.onload = element.onerror = resolve;
  document.head.append(element);
}));

export const loadMarked = () => once("marked", () => import(addresses["marked.esm.js"]));
export const loadPurify = () => script("purify.min.js", "DOMPurify");
export const loadHighlight = () => once("highlight", async () => (await import(addresses["highlight.min.js"])).default);
export const loadMath = async () => (await Promise.all([script("temml.min.js", "temml"), style("Temml-Local.css")]))[0];
export const loadPlot = async () => (await Promise.all([script("uPlot.iife.min.js", "uPlot"), style("uPlot.min.css")]))[0];
export const loadReference = async () => (await Promise.all([script("swagger-ui-bundle.js", "SwaggerUIBundle"), style("swagger-ui.css")]))[0];
