// Images to send: from files, the clipboard, or dropped on the input.

import { $, iconButton, make } from "../ui/dom.js";
import { toastError } from "../ui/toast.js";

const MAX_SIZE = 20e6;
let urls = [];

/** Take the images, as data URLs. */
export function takeImages() {
  const taken = urls;
  urls = [];
  draw();
  return taken;
}

export const hasImages = () => urls.length > 0;

function draw() {
  $("images").replaceChildren(...urls.map((url, i) => make("div", { className: "attached" }, make("img", { src: url, alt: `Image ${i + 1}` }),
    iconButton("close", `Remove image ${i + 1}`, () => { urls.splice(i, 1); draw(); $("prompt").focus(); }))));
}

function add(files) {
  if ($("attach").hidden) return;
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    if (file.size > MAX_SIZE) {
      toastError(`${file.name} is larger than ${MAX_SIZE / 1e6} MB.`, { hint: "Attach a smaller image." });
      continue;
    }
    const reader = new FileReader();
    reader.addEventListener("load", () => { urls.push(reader.result); draw(); });
    reader.readAsDataURL(file);
  }
}

export function startAttachments() {
  $("files").addEventListener("change", ({ target }) => { add(target.files); target.value = ""; });
  $("prompt").addEventListener("paste", ({ clipboardData }) => add(clipboardData.files));
  $("composer").addEventListener("dragover", (event) => event.preventDefault());
  $("composer").addEventListener("drop", (event) => { event.preventDefault(); add(event.dataTransfer.files); });
}
